// Helpers for the document: elements, errors and announcements.

export const element = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const percent = (share) => `${(100 * share).toFixed(0)}\u00a0%`;
const FEW_IMAGES = 10; // a percentage of fewer would look more certain than it is
// A share of images; their number is 0 if it is not known.
export const shareOf = (share, images) => images > 0 && images < FEW_IMAGES
  ? `${Math.round(share * images)} of ${images}` : percent(share);
export const forDrawings = () => document.body.dataset.input === "drawing";

const MAX_LISTED = 5; // names
const MAX_SHOWN = 40; // characters of a name in a sentence

// A name in a sentence; names that are written from right to left do not change the order around them.
export function short(name) {
  const letters = [...name];
  const text = letters.length > MAX_SHOWN ? `${letters.slice(0, MAX_SHOWN - 1).join("")}…` : name;
  return /[\u0590-\u08ff]/.test(text) ? `\u2068${text}\u2069` : text;
}

// Names in a sentence.
export function listed(names) {
  const shown = names.length > MAX_LISTED ? names.slice(0, MAX_LISTED - 1) : names;
  const others = names.length - shown.length;
  return shown.map(short).join(", ") + (others ? ` and ${others} more` : "");
}

// An error stays visible until the action that caused it succeeds, or another action fails.
let failedAction = null;
let failures = 0;

export function showError(error, action) {
  if (!error && failedAction !== action) return;
  if (error) failures++;
  failedAction = error ? action : null;
  const box = element("error");
  box.textContent = error?.message ?? "";
  box.hidden = !error?.message;
  box.toggleAttribute("data-no-answer", Boolean(error?.noAnswer)); // the banner says it, too
}

// Wraps an action of the user: its error is shown, and its success removes any older error.
export const showErrors = (action) => async (...args) => {
  const earlier = failures;
  try {
    await action(...args);
    if (failures === earlier) showError(null, failedAction); // a step of it may show its own error
  } catch (error) {
    showError(error, action);
  }
};

// For screen readers; of texts that follow each other quickly only the last is read.
let announcement = null;
let announced = "";
export function announce(text, delay = 1000) {
  clearTimeout(announcement);
  if (text === announced) return;
  announcement = setTimeout(() => { announced = text; element("announcement").textContent = text; }, delay);
}
