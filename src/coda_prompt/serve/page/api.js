// Requests to the service, and the stream of its states.

import { element } from "./dom.js";

const BASE = new URL("v1/", document.baseURI);
const MAX_SILENCE = 25_000; // ms; the service repeats its state every 10 seconds
const RETRY_INTERVAL = 1000; // ms

export async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The service does not answer. Is it still running?"), { noAnswer: true });
  }
  if (response.status === 401) {
    element("token-form").hidden = false;
    const detail = token ? "This is not the token of the service." : ""; // the form says it
    throw Object.assign(new Error(detail), { status: 401 });
  }
  if (!response.ok) {
    let detail = `The service answered ${response.status}.`;
    try { detail = (await response.json()).detail || detail; } catch { /* no problem document */ }
    throw Object.assign(new Error(detail), { status: response.status });
  }
  return response;
}

export const json = async (path, options) => (await call(path, options)).json();

export function formOf(images, labels = []) {
  const form = new FormData();
  for (const image of images) form.append("images", image, "image");
  for (const label of labels) form.append("labels", label);
  return form;
}

export const post = (path, images, labels) => json(path, { method: "POST", body: formOf(images, labels) });

// Calls `onState` with every state of the service, and `onGone(true)` while it does not answer.
export async function watch(onState, onGone) {
  for (;;) {
    try {
      await readStates((state) => { onGone(false); onState(state); });
      throw new Error("The stream has ended.");
    } catch (error) {
      if (error.status !== 401) onGone(true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_INTERVAL));
  }
}

async function readStates(onState) {
  const controller = new AbortController();
  let timer = setTimeout(() => controller.abort(), MAX_SILENCE);
  const response = await call("events", { signal: controller.signal });
  const reader = response.body.getReader(), text = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), MAX_SILENCE);
      const parts = (buffer + text.decode(value, { stream: true })).split("\n\n");
      buffer = parts.pop();
      for (const part of parts) onState(JSON.parse(part.replace(/^data: /, "")));
    }
  } finally {
    clearTimeout(timer);
  }
}
