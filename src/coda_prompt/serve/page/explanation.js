// How an answer came about: nearest classes with distances, and the weights of prompts.

import { post } from "./api.js";
import { element, make, percent, showError } from "./dom.js";

const INTERVAL = 1000; // ms between two explanations of a moving image
const STRONGEST = 3; // prompts of a block that are named

let wanted = { image: null, prediction: null };
let explained = null;
let busy = false;

// Explains an answer whenever the view is open; another version gives another answer.
export async function explain(answer) {
  wanted = answer;
  element("why").hidden = !answer.prediction;
  if (busy || !answer.prediction || !element("why").open || answer === explained) return;
  busy = true;
  try {
    explained = answer;
    show(await post("explain", [answer.image]));
    showError(null, explain);
  } catch (error) {
    showError(error, explain);
  } finally {
    setTimeout(() => { busy = false; explain(wanted); }, INTERVAL);
  }
}

element("why").addEventListener("toggle", () => explain(wanted));

function show({ nearest, prompts }) {
  const parts = [nearestTable(nearest)];
  if (prompts.length) {
    parts.push(make("h3", { textContent: "Weights of the prompt components for this image (blue: positive, orange: negative)" }),
      ...prompts.map(promptRow));
  }
  element("explanation").replaceChildren(...parts);
}

function nearestTable(nearest) {
  const far = Math.max(...nearest.map(({ distance }) => distance ?? 0), 1e-9);
  const rows = nearest.map(({ label, distance, probability }) => {
    const bar = make("span");
    bar.style.width = `${100 * (distance ?? 0) / far}%`;
    const cell = make("td", { className: "distance" },
      make("span", { textContent: distance === null ? "–" : distance.toFixed(3) }),
      make("span", { className: "track", ariaHidden: "true" }, bar));
    return make("tr", {}, make("th", { scope: "row", title: label }, make("span", { className: "clamped", textContent: label })), cell,
      make("td", { textContent: percent(probability) }));
  });
  const head = ["Class", "Distance", "Probability"].map((text) => make("th", { scope: "col", textContent: text }));
  return make("table", {},
    make("caption", { textContent: "Nearest classes (cosine distance: 0 is the same direction)" }),
    make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

function promptRow({ block, weights }) {
  const largest = Math.max(...weights.map(Math.abs), 1e-9);
  const cells = weights.map((weight) => {
    const cell = make("span", { className: weight < 0 ? "negative" : "positive" });
    cell.style.opacity = `${Math.abs(weight) / largest}`;
    return cell;
  });
  const order = weights.map((_, index) => index).sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
  const strongest = order.slice(0, STRONGEST).map((index) => `${index + 1} (${weights[index].toFixed(2)})`).join(", ");
  const heat = make("div", { className: "heat", ariaHidden: "true" }, ...cells);
  return make("div", { className: "prompt-row" }, heat,
    make("p", { className: "hint", textContent: `Block ${block}, ${weights.length} components; strongest: ${strongest}` }));
}
