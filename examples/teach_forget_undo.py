# %% [markdown]
# # Teach, correct, forget, undo
#
# Change what a model has learned, without the images it learned from.

# %%
import tempfile
from pathlib import Path

from sketches import write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
data = write_sketches(work / "data", ["anvil", "fish", "cow", "cake", "octopus"])
classifier = ContinualClassifier(removable=True, verbose=False)
classifier.learn(data / "train")
classifier.save(work / "model")
classifier.classes_

# %% [markdown]
# Rename a class, and merge two into one.

# %%
classifier.rename("fish", "trout")
classifier.merge_classes(["anvil", "cow"], into="thing")
classifier.classes_

# %% [markdown]
# Forget a class. Because the model was created with `removable`, it now equals a model that never saw the class.

# %%
print(classifier.forget("cake"))
classifier.classes_

# %% [markdown]
# Every lesson and every edit creates a version. Forgetting removed the class from all of them.

# %%
for entry in classifier.history().entries:
    print(entry.kind, entry.what, entry.new)

# %%
classifier.undo()
print(classifier.classes_)
classifier.redo()
print(classifier.classes_)

# %% [markdown]
# `save` stores the versions in the model folder, where `coda undo`, `coda redo` and `coda history` find them.

# %%
classifier.save(work / "model")
sorted(path.name for path in (work / "model" / "versions").iterdir())
