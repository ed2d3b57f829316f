// What the model has learned: lessons with their cost, accuracy of classes, confused pairs, downloads.

import { call, json } from "./api.js";
import { element, listed, make, shareOf, showError, showErrors } from "./dom.js";
import { restore } from "./classes.js";

const view = element("learned");
let wanted = null; // version
let shown = null;

// Shows another version, as soon as the view is open.
export async function setVersion(version) {
  wanted = version;
  if (!view.open || !wanted || wanted === shown) return;
  const asked = wanted;
  try {
    const [history, accuracy] = await Promise.all([json("history"), json("accuracy")]);
    if (asked !== wanted) return;
    shown = asked;
    showLessons(history);
    showClasses(accuracy.classes);
    showConfused(accuracy);
    view.dataset.version = asked;
    showError(null, setVersion);
  } catch (error) {
    showError(error, setVersion);
  }
}

// The cost of a lesson is measured after its version answers.
export function refresh() {
  shown = null;
  setVersion(wanted);
}

view.addEventListener("toggle", () => setVersion(wanted));

const cell = (textContent, className = "") => make("td", { textContent, className });

function table(caption, heads, rows) {
  const columns = heads.map((textContent) => make("th", { scope: "col", textContent }));
  const box = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: caption });
  box.append(make("table", {}, make("caption", { textContent: caption }),
    make("thead", {}, make("tr", {}, ...columns)), make("tbody", {}, ...rows)));
  return box;
}

function showLessons({ entries, versions }) {
  const current = versions.findIndex((version) => version.current);
  const undone = versions.slice(current + 1).map(({ newest, number }) => ({ ...newest, version: number, undone: true }));
  const rows = [...entries, ...undone].map((entry) => lessonRow(entry, versions[current].number)).reverse();
  element("lessons").replaceChildren(rows.length
    ? table("Lessons and edits, the newest first", ["What", "Result", "Version"], rows)
    : make("p", { className: "hint", textContent: "No lessons yet." }));
}

function lessonRow(entry, current) {
  const names = [...entry.new, ...entry.continued.map((name) => `${name} (more images)`)];
  const what = make("th", { scope: "row", textContent: entry.what || listed(names), title: names.join(", ") },
    make("span", { className: "hint", textContent: ` ${new Date(entry.date).toLocaleString()}${entry.undone ? ", undone" : ""}` }));
  const results = names.length ? [
    `${entry.images} images`,
    entry.accuracy === null ? "" : `${shareOf(entry.accuracy, entry.held_out)} right`,
    entry.older_before === null ? "" : `older classes ${shareOf(entry.older_before, entry.older_images)} → ${shareOf(entry.older_after, entry.older_images)}`,
  ] : [];
  return make("tr", { className: entry.undone ? "undone" : "" }, what, cell(results.filter(Boolean).join(", "), "wrap"),
    make("td", {}, versionOf(entry, current, what.title || entry.what)));
}

function versionOf({ version }, current, what) {
  if (version === current) return make("strong", { textContent: "current" });
  if (version === null) return make("span", { className: "hint", textContent: "–" });
  const button = make("button", { type: "button", textContent: "Restore" });
  button.setAttribute("aria-label", `Restore the version after: ${what}`);
  button.onclick = showErrors(() => restore(version));
  return button;
}

function showClasses(classes) {
  const worstFirst = [...classes].sort((a, b) => a.accuracy - b.accuracy || b.images - a.images);
  const rows = worstFirst.map(({ label, images, accuracy }) => {
    const bar = make("span");
    bar.style.width = `${100 * accuracy}%`;
    const measured = make("td", { className: "distance" }, make("span", { textContent: shareOf(accuracy, images) }),
      make("span", { className: "track", ariaHidden: "true" }, bar));
    return make("tr", {}, make("th", { scope: "row", textContent: label }), measured, cell(`${images}`));
  });
  element("class-accuracy").replaceChildren(rows.length
    ? table("Accuracy on held-out images after their lesson, the lowest first", ["Class", "Accuracy", "Images"], rows)
    : make("p", { className: "hint", textContent: "No held-out images yet: a class needs five or more examples." }));
}

function showConfused({ classes, confused }) {
  const rows = confused.map(({ true: right, predicted, images, share: part }) => make("tr", {},
    make("th", { scope: "row", textContent: right }), cell(predicted, "wrap"), cell(`${images} (${shareOf(part, Math.round(images / part))})`)));
  element("confused").replaceChildren(rows.length
    ? table("Most confused pairs of held-out images", ["Class", "Predicted as", "Images"], rows)
    : make("p", { className: "hint", textContent: classes.length ? "No held-out image was confused with another class." : "" }));
}

for (const kind of ["zip", "onnx"]) {
  const button = element(`download-${kind}`);
  button.onclick = showErrors(async () => {
    button.disabled = true;
    element("download-hint").textContent = kind === "onnx" ? "Exporting…" : "";
    try {
      const response = await call(`model.${kind}`); // not a link, which could not send the token
      const name = /filename="(.+)"/.exec(response.headers.get("Content-Disposition"))[1];
      const url = URL.createObjectURL(await response.blob());
      make("a", { href: url, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      element("download-hint").textContent = `${name} was downloaded.`;
    } catch (error) {
      element("download-hint").textContent = "";
      throw error;
    } finally {
      button.disabled = false;
    }
  });
}
