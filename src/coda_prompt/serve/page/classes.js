// The learned classes: rename, merge and forget them; undo and redo.

import { json } from "./api.js";
import { element, make, showErrors } from "./dom.js";

let newClasses = new Set(); // of the last lesson
let names = [];
let edited = null; // the class in the editor
let busy = false; // whether an edit is being made
let onEdited = async () => {};

export const setNew = (added) => { newClasses = new Set(added); };

export function show(model, classes) {
  names = classes;
  setBusy(false); // the stream of states may show an edit before its answer arrives
  element("count").textContent = `(${classes.length})`;
  const buttons = [element("undo"), element("redo")];
  const focused = buttons.find((button) => button === document.activeElement);
  element("undo").disabled = !model.can_undo;
  element("redo").disabled = !model.can_redo;
  if (focused?.disabled) (buttons.find((button) => !button.disabled) ?? element("classes")).focus();
  const first = (name) => (newClasses.has(name) ? 0 : 1);
  const sorted = [...classes].sort((a, b) => first(a) - first(b));
  element("classes").replaceChildren(...sorted.map((name) => {
    const isNew = newClasses.has(name);
    const button = make("button", { type: "button", textContent: isNew ? `${name} · new` : name, title: "Edit this class" });
    button.dataset.name = name;
    button.onclick = () => edit(name);
    return make("li", { className: isNew ? "new-class" : "" }, button);
  }));
  if (edited && !classes.includes(edited)) edit(null);
}

function edit(name) {
  edited = name;
  element("edit-report").textContent = "";
  element("class-editor").hidden = !name;
  if (!name) return;
  element("edited-class").textContent = name;
  element("new-name").value = name;
  const others = names.filter((other) => other !== name);
  element("merge").disabled = !others.length;
  element("merge-into").replaceChildren(...others.map((other) => make("option", { textContent: other })));
  element("new-name").focus();
}

function close() {
  const name = edited;
  edit(null);
  [...element("classes").querySelectorAll("button")].find(({ dataset }) => dataset.name === name)?.focus();
}

function setBusy(value) {
  busy = value;
  element("known").setAttribute("aria-busy", `${busy}`);
  if (busy) element("edit-report").textContent = "Saving the change…";
}

// Sends an edit, one at a time; every page then shows the new version.
async function send(path, body, report) {
  if (busy) return;
  setBusy(true);
  try {
    const headers = { "Content-Type": "application/json" };
    await json(path, { method: "POST", headers, body: body && JSON.stringify(body) });
    newClasses = new Set();
    if (element("class-editor").contains(document.activeElement)) element("classes").focus();
    edit(null);
    await onEdited();
    element("edit-report").textContent = report;
  } catch (error) {
    element("edit-report").textContent = "";
    throw error;
  } finally {
    setBusy(false);
  }
}

// Restores a version by its number.
export const restore = (version) => send(`undo?to=${version}`, null, "Another version was restored.");

// `called` is awaited after every edit.
export function start(called) {
  onEdited = called;
  element("close-editor").onclick = close;
  element("class-editor").onkeydown = ({ key }) => { if (key === "Escape") close(); };
  element("undo").onclick = showErrors(() => send("undo", null, "The last change was undone."));
  element("redo").onclick = showErrors(() => send("redo", null, "The change was made again."));
  element("class-editor").onsubmit = showErrors(async (event) => {
    event.preventDefault();
    const [old, renamed] = [edited, element("new-name").value.trim()];
    if (renamed === old) close();
    else await send("rename", { old, new: renamed }, `${old} is now ${renamed}.`);
  });
  element("merge").onclick = showErrors(() => {
    const [name, into] = [edited, element("merge-into").value];
    return send("merge-classes", { classes: [name, into], into }, `${name} was merged into ${into}.`);
  });
  element("forget").onclick = showErrors(async () => {
    const name = edited;
    if (!confirm(`Forget ${name}? This cannot be undone.`)) return;
    await send("forget", { name, confirm: true }, `${name} was forgotten.`);
  });
}
