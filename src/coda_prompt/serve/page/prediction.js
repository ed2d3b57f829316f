// Predictions of the image that is shown: one request at a time, the newest image wins.

import { post } from "./api.js";
import { announce, element, forDrawings, make, percent, showError } from "./dom.js";

const UNLIKELY = 0.3; // a best guess below this is unknown, if the model has no better rule
const STEADY = 3; // answers in a row that are unknown, before a moving image is called unknown

let model = null;
let shown = { image: null, prediction: null };
let wanted = null; // the newest image that has not been asked for
let busy = false;
let number = 0; // of the newest request; clearing invalidates it
let unknownInARow = 0;
let listener = () => {};

export const current = () => shown;
export const onAnswer = (called) => { listener = called; };

// The model to ask; what is shown is classified again if it is another version.
export function setModel(described, classes) {
  const replaced = model && model.version !== described.version;
  model = { ...described, classes };
  showHint();
  const { image } = shown;
  if (replaced && image) classify(() => image);
}

// Removes the answer for an earlier image; the one for `image` follows.
export const setImage = (image) => show(image, null, true);

export function clear() {
  number++;
  wanted = null;
  show(null, null, true);
}

// Classifies what `take` returns when its turn comes; `moving`: more images will follow.
export async function classify(take, moving = false) {
  wanted = { take, moving };
  if (busy || !model) return;
  setBusy(true);
  while (wanted) {
    const next = wanted, request = ++number;
    wanted = null;
    try {
      const image = await next.take();
      const prediction = model.classes ? await ask(image) : null;
      if (request === number) show(image, prediction, !next.moving);
      showError(null, classify);
    } catch (error) {
      showError(error, classify);
    }
  }
  setBusy(false);
}

function setBusy(value) {
  busy = value;
  element("prediction").setAttribute("aria-busy", `${busy}`);
}

async function ask(image) {
  const rule = model.can_reject ? "unknown=auto" : `unknown_below=${UNLIKELY}`;
  return (await post(`predict?top=5&${rule}`, [image])).predictions[0];
}

function show(image, prediction, settled) {
  shown = { image, prediction };
  showHint();
  unknownInARow = prediction?.unknown ? unknownInARow + 1 : 0;
  const unknown = Boolean(prediction?.unknown) && (settled || unknownInARow >= STEADY);
  element("unknown").hidden = !unknown;
  if (prediction) {
    element("best-guess").textContent = `My best guess: ${prediction.best} (${percent(prediction.probability)}).`;
    announce(unknown ? `I have not seen this before. Best guess: ${prediction.best}`
      : `${prediction.best}, ${percent(prediction.probability)}`);
  }
  element("predictions").replaceChildren(...(prediction?.top ?? []).map(({ label, probability }) => {
    const bar = make("span");
    bar.style.width = `${Math.max(1, 100 * probability)}%`;
    const track = make("span", { className: "track", ariaHidden: "true" }, bar);
    return make("li", {}, make("span", { className: "name clamped", textContent: label, title: label }), track,
      make("span", { className: "percent", textContent: percent(probability) }));
  }));
  element("predictions").classList.toggle("unsure", unknown);
  listener(shown);
}

function showHint() {
  const hint = element("prediction-hint");
  hint.hidden = Boolean(shown.prediction) && model.classes > 1;
  hint.textContent = model && !model.classes
    ? "This model has not learned anything yet. Teach it two or more classes to start."
    : model?.classes === 1 ? "This model knows one class only, which is its answer to everything. Teach it a second one."
    : forDrawings() ? "Draw something: predictions update as you go."
    : "Start the camera, or drop or paste a photograph: predictions appear here.";
  showUnknownHint();
}

// Says what the model needs until it recognises images of other classes.
function showUnknownHint() {
  const hint = element("unknown-hint"), missing = model?.missing_images;
  hint.hidden = !model?.classes || missing === 0;
  hint.textContent = `Unknown images are not recognised reliably yet: the model needs at least ${missing} more ${missing === 1 ? "example" : "examples"} of any class.`;
}
