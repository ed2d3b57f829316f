# %% [markdown]
# # First lesson from a folder
#
# All you need is a folder with one subfolder of images per class. Here the images are sketches that come with the
# package; use a folder of your own.

# %%
import tempfile
from pathlib import Path

from sketches import write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
first = write_sketches(work / "first", ["anvil", "fish", "cow", "cake"])
sorted(path.name for path in (first / "train").iterdir())

# %% [markdown]
# `learn` reads the folder, chooses a backbone by looking at the images, and holds out a fifth of each class to measure
# accuracy and to calibrate probabilities.

# %%
classifier = ContinualClassifier(verbose=False)
learned = classifier.learn(first / "train")
print(learned.chosen)
print(f"{learned.accuracy:.0%} of {learned.held_out} held-out images, {learned.seconds:.1f} s")

# %% [markdown]
# Later there are new classes. The old images are not needed again.

# %%
second = write_sketches(work / "second", ["windmill", "octopus", "tree"])
classifier.learn(second / "train")
classifier

# %% [markdown]
# Call the classifier to predict. The result prints one line per image, and plots.

# %%
images = [first / "test/anvil/00.png", first / "test/cake/03.png", second / "test/octopus/01.png"]
predictions = classifier([str(path) for path in images], top=3)
print(predictions)

# %%
# %matplotlib inline
predictions.plot()

# %% [markdown]
# Has it forgotten the first lesson?

# %%
for lesson, folder in ((1, first), (2, second)):
    print(f"test images of lesson {lesson}: {classifier.evaluate(folder / 'test').accuracy:.0%}")

# %% [markdown]
# A model is a small folder. `coda predict MODEL IMAGE` reads it as well.

# %%
classifier.save(work / "my-model")
{path.name: path.stat().st_size for path in (work / "my-model").iterdir() if path.is_file()}
