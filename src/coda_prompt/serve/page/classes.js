// The learned classes and what can be done with them.

import { json } from "./api.js";
import { element, make, showErrors } from "./dom.js";

let newClasses = new Set(); // of the last lesson

export const setNew = (names) => { newClasses = new Set(names); };

export function show(model, classes) {
  element("count").textContent = `(${classes.length})`;
  element("undo").disabled = !model.can_undo;
  const first = (name) => (newClasses.has(name) ? 0 : 1);
  const sorted = [...classes].sort((a, b) => first(a) - first(b));
  element("classes").replaceChildren(...sorted.map((name) => make("li", {
    textContent: newClasses.has(name) ? `${name} · new` : name,
    className: newClasses.has(name) ? "new-class" : "",
  })));
}

// `onUndone` is called when a lesson was undone.
export function start(onUndone) {
  element("undo").onclick = showErrors(async () => {
    await json("undo", { method: "POST" });
    newClasses = new Set();
    element("report").textContent = "Last lesson undone.";
    await onUndone();
  });
}
