// A lesson: named examples, the Teach button, and the progress of the lesson that is running.

import { post } from "./api.js";
import { announce, element, make, percent, showError, showErrors } from "./dom.js";

const MIN_EXAMPLES = 5; // of a new class
const STAGES = { starting: "Starting", looking: "Reading images", learning: "Training", saving: "Saving" };

let examples = new Map(); // class -> [{blob, url}]
let pending = null; // {blob, url}: an image that has no name yet
let known = new Set(); // learned classes
let ownJob = null; // number of the lesson that this page started
let learning = false;
let online = true;

export function setKnown(classes) {
  known = new Set(classes);
  element("known-names").replaceChildren(...classes.map((value) => make("option", { value })));
  show();
}

export function setOnline(value) {
  online = value;
  if (!online) { learning = false; ownJob = null; element("progress").hidden = true; }
  show();
}

export function className() {
  const name = element("name").value.trim();
  if (!name) { element("name").focus(); throw new Error("Enter a class name first."); }
  return name;
}

export function add(name, blob) {
  if (!examples.has(name)) examples.set(name, []);
  examples.get(name).push({ blob, url: URL.createObjectURL(blob) });
  show();
}

// Opens the lesson with an image that the model does not know.
export function open(blob, guess) {
  discardPending();
  pending = { blob, url: URL.createObjectURL(blob) };
  element("pending-image").src = pending.url;
  element("accept-guess").textContent = `It is “${guess}”`;
  element("accept-guess").onclick = () => { element("name").value = guess; addPending(guess); };
  element("pending").hidden = false;
  element("name").value = "";
  element("teaching").scrollIntoView({ block: "nearest" });
  element("name").focus();
}

// Adds the image that waits for its name; returns whether there was one.
export function addPending(name) {
  if (!pending) return false;
  add(name, pending.blob);
  discardPending();
  return true;
}

function discardPending() {
  if (pending) URL.revokeObjectURL(pending.url);
  pending = null;
  element("pending").hidden = true;
}
element("discard-pending").onclick = discardPending;

function strip([name, list]) {
  const choose = make("button", { type: "button", className: "class-name", textContent: name, title: "Continue with this class" });
  choose.onclick = () => { element("name").value = name; element("name").focus(); };
  const count = make("span", { className: "counter", textContent: `${list.length}` });
  count.setAttribute("aria-label", `${list.length} examples of ${name}`);
  count.setAttribute("role", "img");
  const images = list.map((example, number) => {
    const button = make("button", { type: "button", className: "example", title: "Remove" }, make("img", { src: example.url, alt: "" }));
    button.setAttribute("aria-label", `Remove example ${number + 1} of ${name}`);
    button.onclick = () => {
      URL.revokeObjectURL(example.url);
      list.splice(number, 1);
      if (!list.length) examples.delete(name);
      show();
    };
    return button;
  });
  return make("div", { className: "strip" }, choose, count, make("div", { className: "examples" }, ...images));
}

const missing = ([name, list]) => (known.has(name) ? 1 : MIN_EXAMPLES) - list.length;

function show() {
  element("strips").replaceChildren(...[...examples].map(strip));
  for (const each of document.querySelectorAll(".examples")) each.scrollLeft = each.scrollWidth;
  const incomplete = [...examples].filter((entry) => missing(entry) > 0);
  element("teach").disabled = !examples.size || incomplete.length > 0 || learning || !online;
  element("teach-hint").textContent = learning ? "Training… predictions use the current model."
    : !examples.size ? "No examples yet."
    : incomplete.length ? incomplete.map((entry) => `${missing(entry)} more of “${entry[0]}” needed`).join(", ") + "."
    : `Ready to teach: ${[...examples.keys()].join(", ")}.`;
}

element("teach").onclick = showErrors(async () => {
  const entries = [...examples].flatMap(([name, list]) => list.map(({ blob }) => [name, blob]));
  element("teach").disabled = true;
  try {
    const job = await post("learn", entries.map(([, blob]) => blob), entries.map(([name]) => name));
    ownJob = job.id;
    if (latest?.id === job.id) { const state = latest; latest = null; follow(state); }
  } catch (error) {
    show();
    throw error;
  }
});

let latest = null; // the newest state of a lesson

// Shows the state of the newest lesson, whichever page started it.
export function follow(job) {
  const before = latest;
  latest = job;
  if (!job || JSON.stringify(job) === JSON.stringify(before)) return;
  learning = job.state === "running";
  element("progress").hidden = !learning;
  element("progress").value = job.share;
  const own = job.id === ownJob;
  if (learning) {
    const left = job.seconds_left ? `, about ${Math.ceil(job.seconds_left)} s left` : "";
    element("report").textContent = `${own ? "" : "Another page teaches. "}${STAGES[job.stage] ?? job.stage}${left}…`;
  } else if (own || before?.id === job.id) {
    if (job.state === "done") report(job, own);
    else if (before?.state !== job.state || own) fail(job, own);
  }
  show();
}

function report({ classes, learned, stage }, own) {
  const { kept, held_out, accuracy_own, seconds } = learned;
  element("report").textContent = [
    `Learned ${classes.join(", ")} in ${seconds.toFixed(1)} s.`,
    held_out ? `Accuracy on ${held_out} held-out examples: ${percent(accuracy_own)}.` : "",
    kept ? `${kept.classes} older classes, on ${kept.images} images: ${percent(kept.before)} before, ${percent(kept.after)} now.`
      : stage === "checking" ? "Checking the old classes…" : "",
  ].filter(Boolean).join(" ");
  if (!own) return;
  ownJob = stage === "done" ? null : ownJob;
  for (const name of classes) {
    for (const { url } of examples.get(name) ?? []) URL.revokeObjectURL(url);
    examples.delete(name);
  }
}

function fail({ reason }, own) {
  element("report").textContent = own ? "" : `The lesson of another page failed: ${reason}`;
  if (own) showError(new Error(`The lesson failed: ${reason}`), follow);
  ownJob = null;
}

export function announceLesson(job) {
  if (job?.state === "done") announce(`Learned ${job.classes.join(", ")}.`, 0);
}
