// The page of `coda serve`: show or draw, see predictions, teach classes. No dependencies.

import { json, watch } from "./api.js";
import * as camera from "./camera.js";
import * as classes from "./classes.js";
import { announce, element, forDrawings, listed, make, short, showErrors } from "./dom.js";
import * as drawing from "./drawing.js";
import { explain } from "./explanation.js";
import { accept, acceptPasted, reduced } from "./files.js";
import * as history from "./history.js";
import * as lesson from "./lesson.js";
import * as prediction from "./prediction.js";

const LIVE_INTERVAL = 150; // ms between two predictions of the camera, at least
const MANY_FILES = 20; // from here on the page counts the files it reads
const MAX_PROBLEMS = 3; // files that are named when some cannot be read

// -- what is shown: a drawing, the camera, or an image

drawing.start((finished) => {
  element("shown").hidden = true;
  if (drawing.isEmpty()) prediction.clear();
  else prediction.classify(drawing.render, !finished);
});

const showFile = showErrors(async ([file, ...others]) => {
  if (!file) return;
  if (camera.isOn()) camera.stop();
  await prediction.classify(async () => {
    const image = await reduced(file);
    await showImage(image);
    return image;
  });
  if (others.length) throw new Error(`Of ${others.length + 1} files, ${file.name} was classified. To teach them all, drop them on “Teach”.`);
});

async function showImage(image) {
  const bitmap = forDrawings() ? await createImageBitmap(image) : null;
  prediction.setImage(image);
  if (bitmap) {
    drawing.showImage(bitmap);
    return;
  }
  URL.revokeObjectURL(element("shown").src);
  element("shown").src = URL.createObjectURL(image);
  element("shown").hidden = false;
  element("stage-hint").hidden = true;
}

document.addEventListener("camera", ({ detail }) => {
  const on = camera.isOn();
  element("camera-toggle").textContent = on ? "Stop camera" : "Start camera";
  element("camera-switch").hidden = detail.cameras < 2;
  element("record").disabled = !on;
  element("stage-hint").hidden = on;
  if (on) element("shown").hidden = true;
  prediction.clear();
  if (on) classifyLive();
});

async function classifyLive() {
  while (camera.isOn()) {
    const pause = new Promise((resolve) => setTimeout(resolve, LIVE_INTERVAL));
    if (!document.hidden) await prediction.classify(camera.frame, true);
    await pause;
  }
}

element("camera-toggle").onclick = showErrors(async () => (camera.isOn() ? camera.stop() : camera.start()));
element("camera-switch").onclick = showErrors(camera.useOther);

// -- a lesson

async function currentImage() {
  if (!drawing.isEmpty()) return drawing.render();
  if (camera.isOn()) return camera.frame();
  const { image } = prediction.current();
  if (!image) throw new Error(forDrawings() ? "Draw an example first." : "Start the camera, or drop or paste a photograph first.");
  return image;
}

element("lesson").onsubmit = showErrors(async (event) => {
  event.preventDefault();
  const name = lesson.className();
  if (lesson.addPending(name)) return;
  const image = currentImage();
  if (!drawing.isEmpty()) { drawing.clear(); prediction.clear(); } // before the next stroke begins
  lesson.add(name, await image);
});

const addFiles = showErrors(async (files) => {
  const name = lesson.className(), problems = [];
  for (const [number, file] of files.entries()) {
    if (files.length > MANY_FILES) element("name-hint").textContent = `Reading file ${number + 1} of ${files.length}…`;
    try {
      lesson.add(name, await reduced(file));
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (files.length > MANY_FILES) element("name-hint").textContent = "";
  announce(`${files.length - problems.length} examples of ${short(name)} added.`, 0);
  if (problems.length) throw new Error(summary(problems, files.length));
});

function summary(problems, files) {
  const others = problems.length - MAX_PROBLEMS;
  const lines = [...problems.slice(0, MAX_PROBLEMS), ...(others > 0 ? [`and ${others} more`] : [])];
  return files === 1 ? problems[0] : `Not added, ${problems.length} of ${files} files:\n${lines.join("\n")}`;
}

camera.recordWhileHeld(element("record"), (frame) => lesson.add(lesson.className(), frame), () => {
  let named = false;
  showErrors(async () => { lesson.className(); named = true; })();
  return named;
});

element("teach-me").onclick = showErrors(async () => {
  const { image, prediction: answer } = prediction.current();
  lesson.open(drawing.isEmpty() ? image : await drawing.render(), answer.best);
});

accept("predict-file", "show", showFile);
accept("add-files", "teaching", addFiles);
acceptPasted((files, focused) => (element("teaching").contains(focused) ? addFiles(files) : showFile(files)));
prediction.onAnswer(explain);

// -- the service

let seenVersion = null;
let seenClasses = []; // the last that the service had
let restarted = false; // whether the service answers again and its classes were not compared yet
let checkedJob = null; // the newest lesson whose cost was measured

async function refresh() {
  const [model, { classes: names }] = await Promise.all([json("model"), json("classes")]);
  seenVersion = model.version;
  document.body.dataset.input = model.input;
  element("about").replaceChildren(`${model.method} on ${model.backbone}, `,
    make("span", { className: "unbroken", textContent: `version ${model.version}` }),
    `, ${model.tasks.length} ${model.tasks.length === 1 ? "lesson" : "lessons"}`);
  element("temporary").hidden = !model.temporary;
  element("models").hidden = model.models.length < 2;
  element("models").replaceChildren(...model.models.map(({ name, path, current }) => {
    const link = make("a", { href: path, textContent: name });
    if (current) link.setAttribute("aria-current", "page");
    return link;
  }));
  if (restarted) reportLost(seenClasses.filter((name) => !names.includes(name)), model.temporary);
  [seenClasses, restarted] = [names, false];
  classes.show(model, names);
  lesson.setKnown(names, model.version);
  prediction.setModel(model, names.length);
  history.setVersion(model.version);
  document.body.dataset.ready = "true";
}
const refreshShown = showErrors(refresh);

// A temporary model begins anew when its service is killed.
function reportLost(lost, temporary) {
  element("lost").hidden = !lost.length;
  if (lost.length) element("report").textContent = element("edit-report").textContent = "";
  element("lost-classes").textContent = `The service was restarted, and its model does not know these classes any more: ${listed(lost)}.${
    temporary ? " Temporary models are lost when the service stops; to save what you teach, start it with a model folder: coda serve MODEL" : ""}`;
}
element("close-lost").onclick = () => { element("lost").hidden = true; };

function onState({ version, job }) {
  if (job?.state === "done" && job.version === version && version !== seenVersion) {
    classes.setNew(job.learned.new);
    lesson.announceLesson(job);
  }
  lesson.follow(job);
  if (job?.learned?.kept && checkedJob !== job.id) { checkedJob = job.id; history.refresh(); }
  if (version !== seenVersion) { seenVersion = version; refreshShown(); }
}

let gone = false;
function onGone(value) {
  if (value === gone) return;
  gone = value;
  element("gone").hidden = !gone;
  element("gone").textContent = gone ? "The service does not answer. The page tries again every second; your examples are kept." : "";
  document.body.classList.toggle("offline", gone);
  lesson.setOnline(!gone);
  if (!gone) { restarted = true; refreshShown(); }
}

element("token-form").onsubmit = showErrors(async (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", element("token").value);
  element("token-form").hidden = true;
  await refresh();
});

classes.start(refresh);
lesson.setKnown([], null);
refreshShown();
watch(onState, onGone);
