# %% [markdown]
# # Serve a model and call it from JavaScript
#
# `coda serve MODEL` serves the page and the HTTP interface. This notebook starts it on a free port.

# %%
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sketches import write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
data = write_sketches(work / "data", ["anvil", "fish", "cow"])
classifier = ContinualClassifier("pocket", verbose=False)
classifier.learn(data / "train")
classifier.save(work / "model")
command = [sys.executable, "-m", "coda_prompt", "serve", str(work / "model"), "--port", "0"]
service = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
url = json.loads(service.stdout.readline())["url"]

# %% [markdown]
# This is the whole client: it predicts three images, then teaches them as a new class. Node runs it here; in a
# browser, `fetch`, `FormData` and `Blob` are the same.

# %%
script = """
const [url, ...files] = process.argv.slice(2);
const { readFile } = await import("node:fs/promises");

const form = new FormData();
for (const file of files) form.append("images", new Blob([await readFile(file)]), file);
const answer = await fetch(url + "v1/predict?top=2", { method: "POST", body: form });
for (const { label, probability } of (await answer.json()).predictions)
  console.log(label, probability.toFixed(2));

const lesson = new FormData();
lesson.append("labels", "scribble");
for (const file of files) lesson.append("images", new Blob([await readFile(file)]), file);
let job = await (await fetch(url + "v1/learn", { method: "POST", body: lesson })).json();
while (job.state === "running") {
  await new Promise((resolve) => setTimeout(resolve, 300));
  job = await (await fetch(url + "v1/jobs/" + job.id)).json();
}
console.log("lesson", job.state);
console.log((await (await fetch(url + "v1/classes")).json()).classes.join(", "));
"""
(work / "client.mjs").write_text(script)
images = [str(data / "test" / name / "05.png") for name in ("anvil", "fish", "cow")]
if shutil.which("node"):
    client = ["node", str(work / "client.mjs"), url, *images]
    print(subprocess.run(client, check=True, capture_output=True, text=True).stdout)

# %%
service.terminate()
service.wait()
