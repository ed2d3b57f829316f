// The drawing area: strokes by mouse, pen, finger or keyboard, rendered as the model expects them.

import { element } from "./dom.js";

const SKETCH_SIZE = 28; // pixels, as in the model's training sketches
const STEP = 10; // pixels of the canvas that an arrow key moves the pen

const canvas = element("canvas");
const context = canvas.getContext("2d");
let strokes = [];
let file = null; // the image that is shown instead of strokes
let stroke = null; // the one being drawn
let pen = null; // position of the keyboard's pen
let changed = () => {};

export const isEmpty = () => !strokes.length;

// `onChange(finished)` is called while a stroke is drawn, and when it is finished.
export function start(onChange) {
  changed = onChange;
  paint();
}

export function clear() {
  strokes = [];
  file = stroke = pen = null;
  paint();
}

// Render strokes like the model's training sketches: white on black, scaled to fill a square.
export function render() {
  const points = strokes.flat();
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = 8, size = SKETCH_SIZE * scale, margin = 2.5 * scale;
  const span = Math.max(right - left, bottom - top, 24);
  const factor = (size - 2 * margin) / span;
  const shift = (value, from, to) => (value - (from + to) / 2) * factor + size / 2;
  const lines = strokes.map((line) => line.map(([x, y]) => [shift(x, left, right), shift(y, top, bottom)]));
  const sketch = new OffscreenCanvas(size, size);
  const target = sketch.getContext("2d");
  target.fillStyle = "#000";
  target.fillRect(0, 0, size, size);
  drawLines(target, lines, 1.7 * scale);
  return sketch.convertToBlob({ type: "image/png" });
}

export function showImage(image) {
  clear();
  file = image;
  paint();
}

function paint() {
  context.fillStyle = "#000";
  context.fillRect(0, 0, canvas.width, canvas.height);
  if (file) {
    const scale = Math.min(canvas.width / file.width, canvas.height / file.height);
    const [width, height] = [file.width * scale, file.height * scale];
    context.drawImage(file, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  }
  drawLines(context, strokes, 12);
  if (pen && document.activeElement === canvas) {
    context.strokeStyle = stroke ? "#f0a35e" : "#56b4e9";
    context.lineWidth = 2;
    context.beginPath();
    context.arc(...pen, 9, 0, 7);
    context.stroke();
  }
}

function drawLines(target, lines, width) {
  target.strokeStyle = target.fillStyle = "#fff";
  target.lineWidth = width;
  target.lineCap = target.lineJoin = "round";
  for (const line of lines) {
    target.beginPath();
    target.moveTo(...line[0]);
    for (const point of line.slice(1)) target.lineTo(...point);
    if (line.length === 1) target.lineTo(line[0][0] + 0.1, line[0][1]);
    target.stroke();
  }
}

function position(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width,
          (event.clientY - box.top) * canvas.height / box.height];
}

function begin(point) {
  file = null;
  stroke = [point];
  strokes.push(stroke);
  paint();
}

function finish() {
  if (!stroke) return;
  stroke = null;
  paint();
  changed(true);
}

canvas.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  canvas.setPointerCapture(event.pointerId);
  pen = null;
  begin(position(event));
});
canvas.addEventListener("pointermove", (event) => {
  if (!stroke || pen) return;
  for (const each of event.getCoalescedEvents?.() ?? [event]) stroke.push(position(each));
  paint();
  changed(false);
});
for (const kind of ["pointerup", "pointercancel", "blur"]) canvas.addEventListener(kind, finish);

const MOVES = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };
canvas.addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move && event.key !== " ") return;
  event.preventDefault();
  pen ??= [canvas.width / 2, canvas.height / 2];
  if (!move) {
    if (stroke) finish(); else begin([...pen]);
    return;
  }
  pen = pen.map((value, axis) => Math.min(canvas.width - 6, Math.max(6, value + move[axis])));
  if (stroke) { stroke.push([...pen]); changed(false); }
  paint();
});

element("undo-stroke").onclick = () => { file = null; strokes.pop(); paint(); changed(true); };
element("clear").onclick = () => { clear(); changed(true); };
