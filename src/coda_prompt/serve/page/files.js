// Image files: chosen, dropped or pasted.

import { call, formOf } from "./api.js";
import { element } from "./dom.js";

const MAX_SIDE = 512; // pixels of the shorter side; larger photographs are reduced before sending

// Calls `onFiles` with the images that are chosen with an input or dropped on an element.
export function accept(input, target, onFiles) {
  element(input).onchange = (event) => { onFiles([...event.target.files]); event.target.value = ""; };
  const box = element(target);
  box.addEventListener("dragover", (event) => { event.preventDefault(); box.classList.add("dragging"); });
  box.addEventListener("dragleave", () => box.classList.remove("dragging"));
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    box.classList.remove("dragging");
    onFiles([...event.dataTransfer.files]);
  });
}

// Calls `onFiles` with pasted images and the element that has the focus.
export function acceptPasted(onFiles) {
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    onFiles(files, document.activeElement);
  });
  for (const kind of ["dragover", "drop"]) { // a file that misses its target must not replace the page
    document.addEventListener(kind, (event) => event.preventDefault());
  }
}

// Reduces large images. The service decodes files that the browser cannot, such as HEIC.
export async function reduced(file) {
  const image = await createImageBitmap(file).catch(() => null);
  if (!image) return decoded(file);
  const factor = MAX_SIDE / Math.min(image.width, image.height);
  if (factor >= 1) return file;
  const canvas = new OffscreenCanvas(Math.round(image.width * factor), Math.round(image.height * factor));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff"; // behind transparent pixels, as the service does
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
}

async function decoded(file) {
  await file.slice(0, 1).arrayBuffer().catch(() => {
    throw new Error(`${file.name} cannot be read. Choose image files, not folders.`);
  });
  try {
    return await (await call("preview", { method: "POST", body: formOf([file]) })).blob();
  } catch (error) {
    throw error.status === 422 ? new Error(error.message.replace(/^image 1/, file.name)) : error;
  }
}
