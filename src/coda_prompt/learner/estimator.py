"""Parameters of a classifier as scikit-learn expects them, and its network, built when needed."""

from __future__ import annotations

import copy
import html
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coda_prompt import errors
from coda_prompt.learner.card import TASK_HEADS, task_rows
from coda_prompt.learner.loading import AUTO, TRAINING_FIELDS
from coda_prompt.learner.network import Network
from coda_prompt.learner.predictor import Predictor
from coda_prompt.research import methods
from coda_prompt.research.training.local import LocalDevice, PredictionPrecision, find_device
from coda_prompt.research.vit.catalog import LoadedBackbone

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from typing_extensions import Self

DEFAULT_METHOD = "ranpac"
MAPPINGS = ("options", "training")
"""Parameters whose entries can be set one by one, as `options__NAME`."""
MAX_CLASSES_SHOWN = 10


class Estimator:
    """Holds the parameters; the backbone is loaded when it is first needed."""

    _estimator_type = "classifier"  # for scikit-learn before 1.6

    def __init__(
        self,
        backbone: str = AUTO,
        method: str = DEFAULT_METHOD,
        *,
        options: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        device: str = "auto",
        precision: PredictionPrecision | None = None,
        verbose: bool = True,
        fabric: Fabric | LocalDevice | None = None,
        **more: Any,
    ) -> None:
        self.backbone, self.method, self.device = backbone, method, device
        self.precision, self.verbose, self.fabric = precision, verbose, fabric
        # Keywords of the earlier style: ContinualClassifier(width=256, epochs=3).
        of_training = {name: more.pop(name) for name in list(more) if name in TRAINING_FIELDS}
        self.options = {**(options or {}), **more} if more else options
        self.training = {**(training or {}), **of_training} if of_training else training
        self._entry = find_method(method)
        self._check_option_names()
        self._reset()

    def _check_option_names(self) -> None:
        """Check the names of options; their values are checked when the network is built."""
        of_method, of_training = list(self._entry.type.Config.__dataclass_fields__), TRAINING_FIELDS
        signature = inspect.signature(Estimator.__init__).parameters
        own = [name for name in signature if name not in ("self", "more")]
        for name in self.training or {}:
            if name not in of_training:
                raise errors.UnknownName("option", name, of_training, "the training")
        for name in self.options or {}:
            if name not in (*of_method, "removable"):
                owner = f"ContinualClassifier with {self.method_name}"
                raise errors.UnknownName("option", name, {*of_method, *of_training, *own}, owner)

    def _reset(self) -> None:
        """Forget everything that was learned."""
        self._network: Network | None = None

    # -- parameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor, as scikit-learn asks for them.

        Args:
            deep: Also list each option of the method as `options__NAME` and of the training as
                `training__NAME`.
        """
        signature = inspect.signature(Estimator.__init__).parameters
        names = [name for name in signature if name not in ("self", "fabric", "more")]
        params = {name: getattr(self, name) for name in names}
        if deep:
            for name in MAPPINGS:
                entries = params[name] or {}
                params |= {f"{name}__{key}": value for key, value in entries.items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; what was learned is not changed until `fit`.

        Example:
            ```python
            classifier.set_params(method="coda-p", training__epochs=5)
            ```

        Raises:
            UnknownName: There is no such parameter or method.
        """
        known = self.get_params(deep=False)
        for name, value in params.items():
            group, _, option = name.partition("__")
            if group not in known or (option and group not in MAPPINGS):
                raise errors.UnknownName("parameter", name, (*known, "options__NAME"))
            if option:
                value = {**(getattr(self, group) or {}), option: value}
            setattr(self, group, value)
        self._entry = find_method(self.method)
        if not self.classes_:
            self._network = None
        return self

    def __sklearn_clone__(self) -> Self:
        """Return a classifier with the same parameters that has learned nothing."""
        return type(self)(**copy.deepcopy(self.get_params(deep=False)), fabric=self.fabric)

    def __sklearn_is_fitted__(self) -> bool:
        return bool(self.classes_)

    def __sklearn_tags__(self) -> Any:
        """Describe the classifier to scikit-learn 1.6 and later, which alone calls this."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=False),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=False, three_d_array=True, string=True),
        )

    # -- state

    @property
    def network(self) -> Network:
        """The method, its backbone and the lessons learned so far; loads the backbone once."""
        if self._network is None:
            self._network = self._build("pocket" if self.backbone == AUTO else self.backbone)
        return self._network

    def _build(self, backbone: str | LoadedBackbone, stored_bytes: int | None = None) -> Network:
        """Load a backbone and make the method on it, with nothing learned."""
        fabric = self.fabric or find_device(self.device, self.precision)
        options, training = self.options or {}, self.training or {}
        return Network(backbone, self._entry, options, training, fabric, stored_bytes)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self._entry.name

    @property
    def closed_form(self) -> bool:
        """Whether the method is fitted in closed form: there is nothing to train."""
        return self._entry.type.closed_form

    @property
    def backbone_name(self) -> str:
        """Name of the backbone; with `auto`, the one that was chosen."""
        return self.network.backbone_name

    @property
    def classes_(self) -> list[str]:
        """Class names, in the order in which they were learned."""
        return [] if self._network is None else self._network.classes

    @property
    def tasks_(self) -> list[dict[str, Any]]:
        """One record for each lesson: date, classes, images, accuracy at the time."""
        return [task.model_dump() for task in (self._network.tasks if self._network else [])]

    @property
    def temperature(self) -> float:
        """Divides the logits before they become probabilities; fitted on held-out images."""
        return self.network.temperature

    @property
    def predictor(self) -> Predictor:
        """Classifies images with what has been learned so far.

        Raises:
            NotLearned: No class has been learned yet.
        """
        network = self._network
        if network is None or not network.tasks:
            raise errors.NotLearned([], [])
        return network.predictor

    # -- display

    def __repr__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name, each in inspect.signature(Estimator.__init__).parameters.items()
            if name not in ("self", "fabric", "more") and getattr(self, name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})\n{self._summary()}"

    def _repr_html_(self) -> str:
        """Return the table of lessons for notebooks."""
        lines = [f"<p>{html.escape(self._summary())}</p><table>"]
        for row in task_rows(self._network.tasks if self._network else []):
            if row[0] == 1:
                lines.append(f"<tr><th>{'</th><th>'.join(TASK_HEADS)}</th></tr>")
            cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        return "\n".join([*lines, "</table>"])

    def _summary(self) -> str:
        """Return in one line what has been learned."""
        network = self._network
        if network is None or not network.tasks:
            return f"nothing learned yet; {self.method_name} on {self.backbone}"
        names = errors.join_names(network.classes, MAX_CLASSES_SHOWN)
        return (
            f"{errors.counted(len(network.classes), 'class')} in "
            f"{errors.counted(len(network.tasks), 'lesson')}, {self.method_name} "
            f"on {network.backbone_name}: {names}"
        )


def find_method(name: str) -> methods.Entry:
    """Find a method that a classifier can use.

    Raises:
        BadOption: It needs old images again or would save a whole network.
        UnknownName: There is no such method.
    """
    entry = methods.find(name)
    if entry.type.keeps_images or entry.type.trains_on == "all":
        problem = f"{name} needs old images again, and this classifier keeps none"
    elif not entry.type.frozen_backbone:
        problem = f"{name} trains the whole network, and a model stores only what is added to it"
    else:
        return entry
    raise errors.BadOption(
        "ContinualClassifier", "method", f"{problem}; use {DEFAULT_METHOD} or coda-p"
    )
