// Draw, teach, see. No dependency; everything comes from this service.

const FEWEST = 5;
const SIDE = 28;
const element = (id) => document.getElementById(id);
const canvas = element("canvas");
const pen = canvas.getContext("2d");

let strokes = [];
let current = null;
let lesson = new Map(); // class -> [{blob, url}]
let fresh = new Set();
let learning = false;
let asking = false;
let askAgain = false;

// -- the service

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
  if (response.status === 401) element("door").hidden = false;
  if (!response.ok) {
    let detail = `The service answered ${response.status}.`;
    try { detail = (await response.json()).detail || detail; } catch { /* no document */ }
    throw new Error(detail);
  }
  return response;
}

const json = async (path, options) => (await call(path, options)).json();

// What one action complained of, only its own success or another complaint takes away.
let complainer = null;
function complain(error, who) {
  if (!error && complainer !== who) return;
  complainer = who;
  const place = element("error");
  place.textContent = error ? error.message : "";
  place.hidden = !error;
}

const guarded = (act, who = act) => async (...given) => {
  try { await act(...given); complain(null, complainer); } catch (error) { complain(error, who); }
};

// -- drawing

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width,
          (event.clientY - box.top) * canvas.height / box.height];
}

function paint() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  trace(pen, strokes, 12);
}

function trace(context, lines, width) {
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

// The drawing as the model's sketches are: white on black, filling a square of 28 pixels.
function drawing(drawn) {
  const points = drawn.flat();
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = 8, size = SIDE * scale, margin = 2.5 * scale;
  const span = Math.max(right - left, bottom - top, 24);
  const factor = (size - 2 * margin) / span;
  const shift = (value, from, to) => (value - (from + to) / 2) * factor + size / 2;
  const lines = drawn.map((line) => line.map(([x, y]) => [shift(x, left, right), shift(y, top, bottom)]));
  const large = new OffscreenCanvas(size, size);
  const context = large.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, size, size);
  trace(context, lines, 1.7 * scale);
  return large.convertToBlob({ type: "image/png" });
}

canvas.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  canvas.setPointerCapture(event.pointerId);
  current = [place(event)];
  strokes.push(current);
  paint();
});
canvas.addEventListener("pointermove", (event) => {
  if (!current) return;
  for (const each of event.getCoalescedEvents?.() ?? [event]) current.push(place(each));
  paint();
  ask();
});
for (const kind of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(kind, () => { if (current) { current = null; ask(); } });
}
element("undo-stroke").onclick = () => { strokes.pop(); paint(); ask(); };
element("clear").onclick = () => { strokes = []; paint(); ask(); };

// -- guessing

async function ask() {
  if (asking) { askAgain = true; return; }
  asking = true;
  try {
    do {
      askAgain = false;
      if (!strokes.length) { show(null); continue; }
      show((await predicted([await drawing(strokes)])).predictions[0]);
    } while (askAgain);
    complain(null, ask);
  } catch (error) {
    complain(error, ask);
  } finally {
    asking = false;
  }
}

function predicted(blobs) {
  const form = new FormData();
  for (const blob of blobs) form.append("images", blob, "image");
  return json("/v1/predict?top=5", { method: "POST", body: form });
}

function show(prediction) {
  element("guess-hint").hidden = Boolean(prediction);
  element("guesses").replaceChildren(...(prediction ? prediction.top : []).map(({ label, probability }) => {
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

const askFiles = guarded(async (files) => {
  if (!files.length) return;
  strokes = [];
  const image = await createImageBitmap(files[0]).catch(() => null);
  paint();
  if (image) {
    const scale = Math.min(canvas.width / image.width, canvas.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    pen.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  }
  show((await predicted([files[0]])).predictions[0]);
}, ask);
element("ask-file").onchange = (event) => { askFiles([...event.target.files]); event.target.value = ""; };
canvas.addEventListener("dragover", (event) => event.preventDefault());
canvas.addEventListener("drop", (event) => { event.preventDefault(); askFiles([...event.dataTransfer.files]); });

// -- teaching

function named() {
  const name = element("name").value.trim();
  if (!name) { element("name").focus(); throw new Error("Give the thing a name first."); }
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
  const short = [...lesson].filter(([, examples]) => examples.length < FEWEST);
  const ready = lesson.size > 0 && !short.length && !learning;
  element("teach").disabled = !ready;
  element("teach-hint").textContent = learning ? "Learning; guesses go on meanwhile."
    : !lesson.size ? "Nothing to teach yet."
    : short.length ? short.map(([name, examples]) => `${FEWEST - examples.length} more of “${name}”`).join(", ") + "."
    : `Ready: ${[...lesson.keys()].join(", ")}.`;
}

element("lesson").onsubmit = guarded(async (event) => {
  event.preventDefault();
  const name = named();
  if (!strokes.length) throw new Error("Draw an example first.");
  const taken = strokes;
  strokes = [];
  paint();
  show(null);
  addExample(name, await drawing(taken));
});
const addFiles = guarded(async (files) => { const name = named(); for (const file of files) addExample(name, file); });
element("add-files").onchange = (event) => { addFiles([...event.target.files]); event.target.value = ""; };
element("strips").parentElement.addEventListener("dragover", (event) => event.preventDefault());
element("strips").parentElement.addEventListener("drop", (event) => { event.preventDefault(); addFiles([...event.dataTransfer.files]); });

element("teach").onclick = guarded(async () => {
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
  let held = "", job = null;
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) break;
    held += text.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) { job = JSON.parse(part.replace(/^data: /, "")); progress(job); }
  }
  if (!job || job.state === "running") throw new Error("The service stopped in the middle of the lesson.");
  if (job.state === "failed") throw new Error(`It could not learn this: ${job.reason}`);
  fresh = new Set(job.learned.new);
  lesson = new Map();
  const { kept, held_out, accuracy_own, seconds } = job.learned;
  const percent = (share) => `${(100 * share).toFixed(0)} %`;
  element("report").textContent = [
    `Learned ${[...job.learned.new, ...job.learned.continued].join(", ")} in ${seconds.toFixed(0)} s.`,
    held_out ? `On ${held_out} held-out examples it is right ${percent(accuracy_own)} of the time among these.` : "",
    kept ? `Old classes: ${percent(kept.before)} right before, ${percent(kept.after)} now (test drawings of ${kept.classes}).` : "",
  ].filter(Boolean).join(" ");
  await refresh();
  ask();
}

function progress({ stage, share, seconds_left }) {
  const words = { starting: "Starting", looking: "Looking at the images", learning: "Learning", saving: "Saving", done: "Done" };
  element("progress").value = share;
  const left = seconds_left ? `, about ${Math.ceil(seconds_left)} s left` : "";
  element("report").textContent = `${words[stage] ?? stage}${left}…`;
}

element("undo").onclick = guarded(async () => {
  await json("/v1/undo", { method: "POST" });
  fresh = new Set();
  element("report").textContent = "The last lesson is undone.";
  await refresh();
  ask();
});

// -- what it knows

async function refresh() {
  const [model, { classes }] = await Promise.all([json("/v1/model"), json("/v1/classes")]);
  element("about").textContent = `${model.method} on ${model.backbone}, version ${model.version}, ${model.tasks.length} lessons`;
  element("count").textContent = `(${classes.length} classes)`;
  element("undo").disabled = !model.can_undo;
  const first = (name) => (fresh.has(name) ? 0 : 1);
  const sorted = [...classes].sort((one, other) => first(one) - first(other));
  element("classes").replaceChildren(...sorted.map((name) => {
    const item = Object.assign(document.createElement("li"), { textContent: fresh.has(name) ? `${name} · new` : name });
    if (fresh.has(name)) item.className = "fresh";
    return item;
  }));
}

element("door").onsubmit = guarded(async (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", element("token").value);
  element("door").hidden = true;
  await refresh();
});

paint();
showLesson();
guarded(refresh)();
