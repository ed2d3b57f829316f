// A lesson: named examples, the Teach button, and the progress of the lesson that is running.

import { post } from "./api.js";
import { announce, element, listed, make, shareOf, short, showError, showErrors } from "./dom.js";

const MIN_EXAMPLES = 5; // of a new class
const MAX_NAME = 100; // characters
const MAX_BYTES = 60e6; // of a lesson; the service accepts 64 MiB
const STAGES = { starting: "Starting the learning process", looking: "Reading images", learning: "Training", saving: "Saving" };

const examples = new Map(); // class -> {row, counter, box, list: [{blob, url, button}]}
let pending = null; // {blob, url}: an image that has no name yet
let known = new Set(); // learned classes
let own = null; // {job, sent}: the lesson that this page started, and its examples
let learning = false;
let online = true;
let latest = null; // the newest state of a lesson
let returned = false; // whether the service answers again and its state was not seen yet

// The classes of a version; the report of a lesson is removed when another version replaces it.
export function setKnown(classes, version) {
  known = new Set(classes);
  if (latest?.state === "done" && latest.version !== version) element("report").textContent = "";
  element("known-names").replaceChildren(...classes.map((value) => make("option", { value })));
  show();
}

export function setOnline(value) {
  online = value;
  returned = value;
  if (!online) {
    if (learning) element("report").textContent = "";
    learning = false;
    latest = null;
    element("progress").hidden = true;
  }
  show();
}

const folded = (name) => name.normalize("NFC").toLowerCase();

// The class that the examples are for: a known one if the names differ in capitals only.
export function className() {
  const typed = element("name").value.trim();
  if (!typed) { element("name").focus(); throw new Error("Enter a class name first."); }
  const length = [...typed].length;
  if (length > MAX_NAME) throw new Error(`A class name has at most ${MAX_NAME} characters; this one has ${length}.`);
  const names = [...known, ...examples.keys()];
  const name = names.find((other) => other === typed) ?? names.find((other) => folded(other) === folded(typed)) ?? typed;
  element("name").value = name;
  element("name-hint").textContent = known.has(name) ? `“${short(name)}” is known already: it learns more examples.` : "";
  return name;
}

export function add(name, blob) {
  if (!examples.has(name)) examples.set(name, strip(name));
  const { box, list } = examples.get(name);
  const example = { blob, url: URL.createObjectURL(blob) };
  example.button = make("button", { type: "button", className: "example", title: "Remove this example" }, make("img", { src: example.url, alt: "" }));
  example.button.onclick = () => remove(name, example);
  list.push(example);
  box.append(example.button);
  box.scrollLeft = box.scrollWidth;
  count(name);
  show();
}

// Removes an example and returns the one that takes its place, if any.
function take(name, example) {
  const { list, row } = examples.get(name);
  const place = list.indexOf(example);
  URL.revokeObjectURL(example.url);
  example.button.remove();
  list.splice(place, 1);
  if (list.length) count(name);
  else { examples.delete(name); row.remove(); }
  return list[place] ?? list[place - 1];
}

function remove(name, example) {
  (take(name, example)?.button ?? element("name")).focus();
  show();
}

// Opens the lesson with an image that the model does not know.
export function open(blob, guess) {
  discardPending();
  pending = { blob, url: URL.createObjectURL(blob) };
  element("pending-image").src = pending.url;
  element("accept-guess").textContent = `It is “${short(guess)}”`;
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

function strip(name) {
  const choose = make("button", { type: "button", className: "class-name", title: `Continue with ${name}` },
    make("span", { className: "clamped", textContent: name }));
  choose.onclick = () => { element("name").value = name; element("name").focus(); };
  const counter = make("span", { className: "counter" });
  counter.setAttribute("role", "img");
  const box = make("div", { className: "examples" });
  const removeAll = make("button", { type: "button", className: "remove-all", textContent: "×", title: `Remove all examples of ${name}` });
  removeAll.setAttribute("aria-label", removeAll.title);
  removeAll.onclick = () => { for (const example of [...examples.get(name).list]) take(name, example); element("name").focus(); show(); };
  const row = make("div", { className: "strip" }, choose, counter, box, removeAll);
  element("strips").append(row);
  return { row, counter, box, list: [] };
}

function count(name) {
  const { counter, list } = examples.get(name);
  counter.textContent = `${list.length}`;
  counter.setAttribute("aria-label", `${list.length} ${list.length === 1 ? "example" : "examples"} of ${name}`);
  list.forEach(({ button }, number) => button.setAttribute("aria-label", `Remove example ${number + 1} of ${name}`));
}

const missing = ([name, { list }]) => (known.has(name) ? 1 : MIN_EXAMPLES) - list.length;

function show() {
  const incomplete = [...examples].filter((entry) => missing(entry) > 0);
  disableTeach(!examples.size || incomplete.length > 0 || learning || !online);
  element("teach-hint").textContent = !online ? "Waiting for the service…"
    : learning ? "Training… predictions use the current model."
    : !examples.size ? "No examples yet."
    : incomplete.length ? incomplete.map((entry) => `${missing(entry)} more of “${short(entry[0])}” needed`).join(", ") + "."
    : `Ready to teach: ${listed([...examples.keys()])}.`;
  element("remove-hint").hidden = !examples.size;
}

// A disabled button loses the focus: it moves to the text beside it.
function disableTeach(disabled) {
  const focused = document.activeElement === element("teach");
  element("teach").disabled = disabled;
  if (focused && disabled) element("teach-hint").focus();
}

element("teach").onclick = showErrors(async () => {
  const sent = [...examples].flatMap(([name, { list }]) => list.map((example) => ({ name, example })));
  const blobs = sent.map(({ example }) => example.blob);
  const bytes = blobs.reduce((sum, { size }) => sum + size, 0);
  if (bytes > MAX_BYTES) {
    throw new Error(`The examples have ${Math.ceil(bytes / 1e6)} MB; a lesson has at most ${MAX_BYTES / 1e6} MB. Remove some and teach them in a second lesson.`);
  }
  disableTeach(true);
  try {
    const job = await post("learn", blobs, sent.map(({ name }) => name));
    own = { job, sent };
    if (latest?.id === job.id) { const state = latest; latest = null; follow(state); }
  } catch (error) {
    show();
    throw error;
  }
});

addEventListener("beforeunload", (event) => { if (examples.size) event.preventDefault(); });

// Numbers of lessons begin anew when the service is restarted.
const isOwn = (job) => own !== null && job?.id === own.job.id && `${own.job.classes}` === `${job.classes}` && own.job.images === job.images;

// Shows the state of the newest lesson, whichever page started it.
export function follow(job) {
  const before = latest;
  latest = job;
  if (returned && own && !isOwn(job)) {
    own = null;
    element("report").textContent = "The service was stopped during the lesson. Your examples are kept: click Teach again.";
  }
  returned = false;
  if (!job || JSON.stringify(job) === JSON.stringify(before)) return;
  learning = job.state === "running";
  element("progress").hidden = !learning;
  element("progress").value = job.share;
  const mine = isOwn(job);
  if (learning) {
    const left = job.seconds_left ? `, about ${Math.ceil(job.seconds_left)} s left` : "";
    element("report").textContent = `${mine ? "" : "A lesson is running. "}${STAGES[job.stage] ?? job.stage}${left}…`;
  } else if (mine || before?.id === job.id) {
    if (job.state === "done") report(job, mine);
    else if (before?.state !== job.state || mine) fail(job, mine);
  }
  show();
}

function report({ classes, learned, stage }, mine) {
  const { kept, held_out, accuracy, seconds, warnings = [], hints = [] } = learned;
  const others = [...known].some((name) => !classes.includes(name));
  const result = [
    `Learned ${listed(classes)} in ${seconds.toFixed(1)} s.`,
    held_out ? `Of ${held_out} held-out ${held_out === 1 ? "example" : "examples"}, ${shareOf(accuracy, held_out)} right.` : "",
    kept ? `Older classes (${kept.classes}, on ${kept.images} ${kept.images === 1 ? "image" : "images"}): ${shareOf(kept.before, kept.images)} right before, ${shareOf(kept.after, kept.images)} now.`
      : stage === "checking" && others ? "Checking the old classes…" : "",
  ].filter(Boolean).join(" ");
  const advice = [...warnings.map((text) => `Warning: ${text}.`), ...hints.map((text) => `Hint: ${text}.`)];
  element("report").textContent = [result, ...advice].join("\n");
  if (!mine) return;
  for (const { name, example } of own.sent.splice(0)) { // not those that were added meanwhile
    if (examples.get(name)?.list.includes(example)) take(name, example);
  }
  if (classes.includes(element("name").value)) {
    element("name").value = "";
    element("name-hint").textContent = "";
  }
  if (stage === "done") own = null;
}

function fail({ reason }, mine) {
  element("report").textContent = mine ? "" : `The lesson failed: ${reason}`;
  if (mine) showError(new Error(`The lesson failed: ${reason} The model is as it was, and your examples are kept.`), follow);
  own = null;
}

export function announceLesson(job) {
  if (job?.state === "done") announce(`Learned ${listed(job.classes)}.`, 0);
}
