// The page of `coda serve`: draw, see predictions, teach classes. No dependencies.

const MIN_EXAMPLES = 5; // per class
const SKETCH_SIZE = 28; // pixels, as in the model's training sketches
const element = (id) => document.getElementById(id);
const canvas = element("canvas");
const canvasContext = canvas.getContext("2d");

let strokes = [];
let currentStroke = null;
let lesson = new Map(); // class -> [{blob, url}]
let newClasses = new Set(); // of the last lesson
let learning = false;
let predicting = false;
let predictAgain = false;
let newestImage = 0;

// -- requests

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The service cannot be reached. Is it still running?");
  }
  if (response.status === 401) element("token-form").hidden = false;
  if (!response.ok) {
    let detail = `The service answered ${response.status}.`;
    try { detail = (await response.json()).detail || detail; } catch { /* no problem document */ }
    throw new Error(detail);
  }
  return response;
}

const json = async (path, options) => (await call(path, options)).json();

// An error stays visible until the action that caused it succeeds, or another action fails.
let failedAction = null;
function showError(error, action) {
  if (!error && failedAction !== action) return;
  failedAction = action;
  const box = element("error");
  box.textContent = error ? error.message : "";
  box.hidden = !error;
}

const showErrors = (action, owner = action) => async (...args) => {
  try { await action(...args); showError(null, failedAction); } catch (error) { showError(error, owner); }
};

// -- drawing

function canvasPoint(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width,
          (event.clientY - box.top) * canvas.height / box.height];
}

function paint() {
  canvasContext.fillStyle = "#000";
  canvasContext.fillRect(0, 0, canvas.width, canvas.height);
  drawLines(canvasContext, strokes, 12);
}

function drawLines(context, lines, width) {
  context.strokeStyle = context.fillStyle = "#fff";
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  for (const line of lines) {
    context.beginPath();
    context.moveTo(...line[0]);
    for (const point of line.slice(1)) context.lineTo(...point);
    if (line.length === 1) context.lineTo(line[0][0] + 0.1, line[0][1]);
    context.stroke();
  }
}

// Render strokes like the model's training sketches: white on black, scaled to fill a square.
function renderSketch(strokes) {
  const points = strokes.flat();
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = 8, size = SKETCH_SIZE * scale, margin = 2.5 * scale;
  const span = Math.max(right - left, bottom - top, 24);
  const factor = (size - 2 * margin) / span;
  const shift = (value, from, to) => (value - (from + to) / 2) * factor + size / 2;
  const lines = strokes.map((line) => line.map(([x, y]) => [shift(x, left, right), shift(y, top, bottom)]));
  const sketch = new OffscreenCanvas(size, size);
  const context = sketch.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, size, size);
  drawLines(context, lines, 1.7 * scale);
  return sketch.convertToBlob({ type: "image/png" });
}

const forDrawings = () => document.body.dataset.input === "drawing";
canvas.addEventListener("pointerdown", (event) => {
  if (!forDrawings()) return;
  event.preventDefault();
  canvas.setPointerCapture(event.pointerId);
  currentStroke = [canvasPoint(event)];
  strokes.push(currentStroke);
  paint();
});
canvas.addEventListener("pointermove", (event) => {
  if (!currentStroke) return;
  for (const each of event.getCoalescedEvents?.() ?? [event]) currentStroke.push(canvasPoint(each));
  paint();
  predictDrawing();
});
for (const kind of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(kind, () => { if (currentStroke) { currentStroke = null; predictDrawing(); } });
}
element("undo-stroke").onclick = () => { strokes.pop(); paint(); predictDrawing(); };
element("clear").onclick = () => { strokes = []; paint(); predictDrawing(); };

// -- predictions

async function predictDrawing() {
  if (predicting) { predictAgain = true; return; }
  predicting = true;
  try {
    do {
      predictAgain = false;
      if (!strokes.length) { showPrediction(null); continue; }
      await classify(renderSketch(strokes));
    } while (predictAgain);
    showError(null, predictDrawing);
  } catch (error) {
    showError(error, predictDrawing);
  } finally {
    predicting = false;
  }
}

// Shows the answer, unless another image was to be classified in the meantime.
async function classify(image) {
  const number = ++newestImage;
  const { predictions } = await predict([await image]);
  if (number === newestImage) showPrediction(predictions[0]);
}

function predict(blobs) {
  const form = new FormData();
  for (const blob of blobs) form.append("images", blob, "image");
  const unknown = document.body.dataset.rejects === "true" ? "&unknown=auto" : "";
  return json(`/v1/predict?top=5${unknown}`, { method: "POST", body: form });
}

function showPrediction(prediction) {
  element("prediction-hint").hidden = Boolean(prediction);
  element("unknown-hint").hidden = !(prediction && prediction.unknown);
  element("predictions").replaceChildren(...(prediction ? prediction.top : []).map(({ label, probability }) => {
    const row = document.createElement("li");
    const name = Object.assign(document.createElement("span"), { className: "name", textContent: label });
    const track = Object.assign(document.createElement("span"), { className: "track" });
    track.setAttribute("aria-hidden", "true");
    const bar = document.createElement("span");
    bar.style.width = `${Math.max(1, 100 * probability)}%`;
    track.append(bar);
    const percent = Object.assign(document.createElement("span"), { className: "percent", textContent: `${(100 * probability).toFixed(0)} %` });
    row.append(name, track, percent);
    return row;
  }));
}

const predictFiles = showErrors(async (files) => {
  if (!files.length) return;
  strokes = [];
  predictAgain = false;
  const image = await createImageBitmap(files[0]).catch(() => null);
  paint();
  if (image) {
    const scale = Math.min(canvas.width / image.width, canvas.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    canvasContext.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  }
  await classify(files[0]);
}, predictDrawing);
element("predict-file").onchange = (event) => { predictFiles([...event.target.files]); event.target.value = ""; };
canvas.addEventListener("dragover", (event) => event.preventDefault());
canvas.addEventListener("drop", (event) => { event.preventDefault(); predictFiles([...event.dataTransfer.files]); });

// -- teaching

function className() {
  const name = element("name").value.trim();
  if (!name) { element("name").focus(); throw new Error("Enter a class name first."); }
  return name;
}

function addExample(name, blob) {
  if (!lesson.has(name)) lesson.set(name, []);
  lesson.get(name).push({ blob, url: URL.createObjectURL(blob) });
  showLesson();
}

function showLesson() {
  element("strips").replaceChildren(...[...lesson].map(([name, examples]) => {
    const strip = Object.assign(document.createElement("div"), { className: "strip" });
    strip.append(Object.assign(document.createElement("strong"), { textContent: `${name} (${examples.length})` }));
    examples.forEach((example, number) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "example", title: "Remove" });
      button.setAttribute("aria-label", `Remove example ${number + 1} of ${name}`);
      button.append(Object.assign(document.createElement("img"), { src: example.url, alt: "" }));
      button.onclick = () => {
        URL.revokeObjectURL(example.url);
        examples.splice(number, 1);
        if (!examples.length) lesson.delete(name);
        showLesson();
      };
      strip.append(button);
    });
    return strip;
  }));
  const incomplete = [...lesson].filter(([, examples]) => examples.length < MIN_EXAMPLES);
  const ready = lesson.size > 0 && !incomplete.length && !learning;
  element("teach").disabled = !ready;
  element("teach-hint").textContent = learning ? "Training… predictions use the current model."
    : !lesson.size ? "No examples yet."
    : incomplete.length ? incomplete.map(([name, examples]) => `${MIN_EXAMPLES - examples.length} more of “${name}” needed`).join(", ") + "."
    : `Ready to teach: ${[...lesson.keys()].join(", ")}.`;
}

element("lesson").onsubmit = showErrors(async (event) => {
  event.preventDefault();
  const name = className();
  if (!strokes.length) throw new Error(forDrawings() ? "Draw an example first." : "Add photographs with “Add files”.");
  const example = strokes;
  strokes = [];
  paint();
  showPrediction(null);
  addExample(name, await renderSketch(example));
});
const addFiles = showErrors(async (files) => { const name = className(); for (const file of files) addExample(name, file); });
element("add-files").onchange = (event) => { addFiles([...event.target.files]); event.target.value = ""; };
element("strips").parentElement.addEventListener("dragover", (event) => event.preventDefault());
element("strips").parentElement.addEventListener("drop", (event) => { event.preventDefault(); addFiles([...event.dataTransfer.files]); });

element("teach").onclick = showErrors(async () => {
  const form = new FormData();
  for (const [name, examples] of lesson) {
    for (const { blob } of examples) { form.append("images", blob, "image"); form.append("labels", name); }
  }
  const job = await json("/v1/learn", { method: "POST", body: form });
  learning = true;
  showLesson();
  element("report").textContent = "";
  element("progress").hidden = false;
  try {
    await follow(job.id);
  } finally {
    learning = false;
    element("progress").hidden = true;
    showLesson();
  }
});

async function follow(number) {
  const reader = (await call(`/v1/jobs/${number}/events`)).body.getReader();
  const text = new TextDecoder();
  let buffer = "", job = null;
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) break;
    buffer += text.decode(value, { stream: true });
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) { job = JSON.parse(part.replace(/^data: /, "")); showProgress(job); }
  }
  if (!job || job.state === "running") throw new Error("The service stopped during the lesson.");
  if (job.state === "failed") throw new Error(`The lesson failed: ${job.reason}`);
  newClasses = new Set(job.learned.new);
  lesson = new Map();
  const { kept, held_out, accuracy_own, seconds } = job.learned;
  const percent = (share) => `${(100 * share).toFixed(0)} %`;
  element("report").textContent = [
    `Learned ${[...job.learned.new, ...job.learned.continued].join(", ")} in ${seconds.toFixed(0)} s.`,
    held_out ? `Accuracy on ${held_out} validation examples: ${percent(accuracy_own)}.` : "",
    kept ? `Old classes (${kept.classes}, test drawings): ${percent(kept.before)} before, ${percent(kept.after)} now.` : "",
  ].filter(Boolean).join(" ");
  await refresh();
  predictDrawing();
}

function showProgress({ stage, share, seconds_left }) {
  const stages = { starting: "Starting", looking: "Reading images", learning: "Training", saving: "Saving", done: "Done" };
  element("progress").value = share;
  const left = seconds_left ? `, about ${Math.ceil(seconds_left)} s left` : "";
  element("report").textContent = `${stages[stage] ?? stage}${left}…`;
}

element("undo").onclick = showErrors(async () => {
  await json("/v1/undo", { method: "POST" });
  newClasses = new Set();
  element("report").textContent = "Last lesson undone.";
  await refresh();
  predictDrawing();
});

// -- learned classes

async function refresh() {
  const [model, { classes }] = await Promise.all([json("/v1/model"), json("/v1/classes")]);
  document.body.dataset.input = model.input;
  document.body.dataset.rejects = model.can_reject;
  element("about").textContent = `${model.method} on ${model.backbone} (for ${model.input}s), version ${model.version}, ${model.tasks.length} lessons`;
  element("count").textContent = `(${classes.length} classes)`;
  element("undo").disabled = !model.can_undo;
  const first = (name) => (newClasses.has(name) ? 0 : 1);
  const sorted = [...classes].sort((a, b) => first(a) - first(b));
  element("classes").replaceChildren(...sorted.map((name) => {
    const item = Object.assign(document.createElement("li"), { textContent: newClasses.has(name) ? `${name} · new` : name });
    if (newClasses.has(name)) item.className = "new-class";
    return item;
  }));
}

element("token-form").onsubmit = showErrors(async (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", element("token").value);
  element("token-form").hidden = true;
  await refresh();
});

paint();
showLesson();
showErrors(refresh)();
