# %% [markdown]
# # Teach, correct, forget, undo
#
# What was taught can be changed without the images it was taught with.

# %%
import tempfile
from pathlib import Path

from sketches import write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
data = write_sketches(work / "data", ["anvil", "fish", "cow", "cake", "octopus"])
classifier = ContinualClassifier(verbose=False, options={"removable": True})
classifier.learn(data / "train")
classifier.save(work / "model")
classifier.classes_

# %% [markdown]
# Rename a class, and unite two.

# %%
classifier.rename("fish", "trout")
classifier.merge_classes(["anvil", "cow"], into="thing")
classifier.classes_

# %% [markdown]
# Forget one. The model was made `removable`, so it then equals a model that never saw the class.

# %%
print(classifier.forget("cake"))
classifier.classes_

# %% [markdown]
# Every lesson and every edit is a version; forgetting removed the class from all of them.

# %%
for entry in classifier.history().entries:
    print(entry.kind, entry.what, entry.new)

# %%
classifier.undo()
print(classifier.classes_)
classifier.redo()
print(classifier.classes_)

# %% [markdown]
# Saved, the versions are in the model folder: `coda undo`, `coda redo` and `coda history` work on it too.

# %%
classifier.save(work / "model")
sorted(path.name for path in (work / "model" / "versions").iterdir())
