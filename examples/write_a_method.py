# %% [markdown]
# # Write a method
#
# A method is a class in a file. This one classifies by the nearest class *median* of frozen features.

# %%
import tempfile
from pathlib import Path

from sketches import NAMES, write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
(work / "mine.py").write_text('''
"""Nearest class median."""

import torch
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.closedform import ClosedForm


class NearestMedian(ClosedForm):
    """Nearest class median of frozen features."""

    def __init__(self, backbone, config):
        super().__init__(backbone, config)
        self.medians = Bank((self.vit_config.width,))

    def begin_task(self, brief):
        super().begin_task(brief)
        new = self.classes_seen - len(self.medians)
        self.medians.append(torch.zeros(new, self.vit_config.width))

    def fit(self, features, queries, labels):
        for row in labels.unique():
            self.medians.frozen[row] = features[labels == row].median(dim=0).values

    def scores(self, queries):
        return 20 * F.normalize(queries, dim=-1) @ F.normalize(self.medians.rows, dim=-1).T
''')

# %% [markdown]
# Use it wherever a name of a method is accepted: here, on the command line and in benchmarks.

# %%
data = write_sketches(work / "data", list(NAMES[:10]))
for method in (f"{work}/mine.py:NearestMedian", "ncm", "ranpac"):
    classifier = ContinualClassifier("pocket", method, verbose=False)
    classifier.learn(data / "train")
    print(f"{method.rpartition(':')[2]:14} {classifier.score(data / 'test'):.1%}")

# %% [markdown]
# A method that trains derives from `PromptMethod` or `TrainedMethod`. The guide *Add a method* describes the contract.
