/* Search on pages opened from a disk. Browsers start no worker for file:// pages, so the search's worker script
   runs in a hidden frame that offers the same messages. The theme looks for the name IFrameWorker. */
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const loaded = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = reject;
          inner.document.head.append(script);
        });
      inner.document.open();
      inner.document.write("<!doctype html><title>search</title>");
      inner.document.close();
      inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      inner.importScripts = async (...sources) => {
        for (const source of sources) await loaded(source);
      };
      this.ready = loaded(url).then(() => inner);
    }
    postMessage(data) {
      this.ready.then((inner) => {
        const message = new MessageEvent("message", { data });
        inner.dispatchEvent(message);
        inner.onmessage?.(message);
      });
    }
  };
  window.Worker = window.IFrameWorker;
}
