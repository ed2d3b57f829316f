# %% [markdown]
# # Compare methods on your own images
#
# The three methods of `coda learn` that need no training learn four lessons of five classes each. Accuracy is over all
# classes learned so far.

# %%
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt
from sketches import NAMES, write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
lessons = [write_sketches(work / str(i), list(NAMES[5 * i : 5 * i + 5])) for i in range(4)]

# %%
curves = {}
for method in ("ncm", "slda", "ranpac"):
    classifier = ContinualClassifier("pocket", method, verbose=False)
    curve = []
    for number, lesson in enumerate(lessons, 1):
        classifier.learn(lesson / "train", validation=0)
        scores = [classifier.score(each / "test") for each in lessons[:number]]
        curve.append(100 * sum(scores) / number)
    curves[method] = curve
    print(f"{method:8}", " ".join(f"{value:5.1f}" for value in curve))

# %%
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for method, curve in curves.items():
    axes.plot(range(5, 21, 5), curve, marker="o", label=method)
axes.set(xlabel="classes learned", ylabel="accuracy over all of them, %", ylim=(0, 100))
_ = axes.legend(frameon=False)

# %% [markdown]
# For a table with several trials and confidence intervals use `coda bench`; `--set source=FOLDER` reads your own
# images.
