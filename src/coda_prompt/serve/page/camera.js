// The camera: start and stop it, take single frames and bursts.

import { element } from "./dom.js";

const FRAME_SIZE = 320; // pixels of a square frame
const BURST_INTERVAL = 120; // ms between two frames of a burst

const PROBLEMS = {
  NotAllowedError: "The browser does not let this page use the camera. Allow it in the settings of the page (next to its address).",
  NotFoundError: "No camera was found.",
  NotReadableError: "The camera is in use by another program.",
};

const video = element("camera");
let stream = null;
let facing = "environment";

export const isOn = () => stream !== null;

export async function start() {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new Error("The camera needs a page on localhost or HTTPS. Use “Classify a file” or “Add files”.");
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: facing }, audio: false });
  } catch (error) {
    const problem = PROBLEMS[error.name] ?? `The camera cannot be used (${error.message || error.name}).`;
    throw new Error(`${problem} Photographs from files work without a camera.`);
  }
  stream.getVideoTracks()[0].addEventListener("ended", stop);
  video.srcObject = stream;
  await video.play();
  video.hidden = false;
  video.classList.toggle("mirrored", stream.getVideoTracks()[0].getSettings().facingMode !== "environment");
  const devices = await navigator.mediaDevices.enumerateDevices();
  const cameras = devices.filter(({ kind }) => kind === "videoinput").length;
  document.dispatchEvent(new CustomEvent("camera", { detail: { cameras } }));
}

export function stop() {
  for (const track of stream?.getTracks() ?? []) track.stop();
  stream = null;
  video.srcObject = null;
  video.hidden = true;
  document.dispatchEvent(new CustomEvent("camera", { detail: { cameras: 0 } }));
}

export async function useOther() {
  facing = facing === "environment" ? "user" : "environment";
  stop();
  await start();
}

// The square in the middle of the picture, which is what the page shows.
export function frame() {
  const side = Math.min(video.videoWidth, video.videoHeight);
  const square = new OffscreenCanvas(FRAME_SIZE, FRAME_SIZE);
  const [x, y] = [(video.videoWidth - side) / 2, (video.videoHeight - side) / 2];
  square.getContext("2d").drawImage(video, x, y, side, side, 0, 0, FRAME_SIZE, FRAME_SIZE);
  return square.convertToBlob({ type: "image/jpeg", quality: 0.92 });
}

// Calls `onFrame` with one frame after the other while the button is held, by pointer or keyboard.
export function recordWhileHeld(button, onFrame, canRecord) {
  let held = false, recording = false;
  const idle = button.textContent;
  const setRecording = (value) => {
    recording = value;
    button.classList.toggle("recording", value);
    button.textContent = value ? "Recording…" : idle;
  };
  const press = async () => {
    held = canRecord();
    if (!held || recording) return;
    setRecording(true);
    try {
      for (let count = 1; held && isOn(); count++) {
        onFrame(await frame());
        button.textContent = `Recording: ${count}`; // the counter of the class may be out of sight
        await new Promise((resolve) => setTimeout(resolve, BURST_INTERVAL));
      }
    } finally {
      setRecording(false);
    }
  };
  const release = () => { held = false; };
  const isKey = (event) => event.key === " " || event.key === "Enter";
  button.addEventListener("pointerdown", (event) => { button.setPointerCapture(event.pointerId); press(); });
  button.addEventListener("keydown", (event) => { if (isKey(event)) { event.preventDefault(); if (!event.repeat) press(); } });
  button.addEventListener("keyup", (event) => { if (isKey(event)) release(); });
  button.addEventListener("contextmenu", (event) => event.preventDefault());
  for (const kind of ["pointerup", "pointercancel", "blur"]) button.addEventListener(kind, release);
}
