"""Requests and responses of the HTTP service as pydantic models, and their OpenAPI entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import models_json_schema

from coda_prompt.learner.explanation import Neighbour, PromptWeights
from coda_prompt.learner.held_out import HeldOutClass
from coda_prompt.learner.predict import Prediction
from coda_prompt.learner.reports import DESCRIBED
from coda_prompt.learner.results import Confusion
from coda_prompt.serve.uploads import MAX_IMAGES_LEARN, MAX_IMAGES_PREDICT

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_CLASSES = 1_000
"""Classes that one request merges."""
MAX_NAME_SHOWN = 40
"""Characters of an unknown field's name in an answer."""


class Body(BaseModel):
    """The body of a request.

    Unknown fields are refused after validation, because `extra="forbid"` lists all of them.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name in self.model_extra or ():
            raise ValueError(f"there is no field {name[:MAX_NAME_SHOWN]!r}")
        return self


class ImageData(Body):
    data: bytes = Field(
        description="An image file as base64 or as a data URL.",
        json_schema_extra={"format": "byte"},
    )


class LabelledImageData(ImageData):
    label: str = Field(description="Class name.")


class PredictRequest(Body):
    images: list[ImageData] = Field(
        min_length=1, max_length=MAX_IMAGES_PREDICT, fail_fast=True, description="The images."
    )


class LearnRequest(Body):
    images: list[LabelledImageData] = Field(
        min_length=1,
        max_length=MAX_IMAGES_LEARN,
        fail_fast=True,
        description="The images with their classes.",
    )


class RenameRequest(Body):
    old: str = Field(description="Current name of the class.")
    new: str = Field(description="New name.")


class MergeClassesRequest(Body):
    classes: list[str] = Field(
        min_length=2, max_length=MAX_CLASSES, fail_fast=True, description="Classes to merge."
    )
    into: str = Field(description="Name of the merged class.")


class ForgetRequest(Body):
    name: str = Field(description="The class to forget.")
    confirm: bool = Field(description="Must be true: this cannot be undone.")


class Predictions(BaseModel):
    model_config = DESCRIBED

    version: str = Field(description="The model version that made the predictions.")
    predictions: list[Prediction] = Field(description="One for each image, in order.")


class JobState(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str = Field(description="Number of the job, for `/v1/jobs/{number}`.")
    state: str = Field(default="running", description="`running`, `done` or `failed`.")
    stage: str = Field(
        default="starting",
        description="`starting`, `looking`, `learning`, `saving`, then with the state `done`: "
        "`checking` while it is measured what the lesson made the model forget, `done`.",
    )
    share: float = Field(default=0.0, description="Progress of the stage, from 0 to 1.")
    seconds_left: float | None = Field(
        default=None, description="Estimated time to the end of the stage; null if unknown."
    )
    images: int = Field(description="Images of the lesson.")
    classes: list[str] = Field(description="Classes of the lesson.")
    reason: str | None = Field(default=None, description="Why the lesson failed.")
    learned: dict[str, Any] | None = Field(
        default=None, description="Results of a finished lesson."
    )
    version: str | None = Field(default=None, description="The model version after the lesson.")


class ServiceState(BaseModel):
    version: str = Field(description="The current model version.")
    learning: bool = Field(description="Whether a lesson is running.")
    job: JobState | None = Field(description="The newest lesson since the service started.")


class ExplanationAnswer(BaseModel):
    model_config = DESCRIBED

    version: str = Field(description="The model version that is explained.")
    nearest: list[Neighbour] = Field(description="Nearest classes, the nearest first.")
    prompts: list[PromptWeights] = Field(
        description="Weights of the prompts for this image; empty for methods without prompts."
    )


class ModelLink(BaseModel):
    name: str = Field(description="Name of the model.")
    path: str = Field(description="Path of its page; its routes start with it.")
    current: bool = Field(description="Whether it is the model of this route.")


class Classes(BaseModel):
    version: str = Field(description="The current model version.")
    classes: list[str] = Field(description="Class names in the order they were learned.")


class HeldOutAccuracy(BaseModel):
    model_config = DESCRIBED

    version: str = Field(description="The current model version.")
    classes: list[HeldOutClass] = Field(description="Classes that had held-out images.")
    confused: list[Confusion] = Field(description="Most confused pairs first.")


class ModelInfo(BaseModel):
    version: str = Field(description="The current model version.")
    method: str = Field(description="Name of the method.")
    backbone: str = Field(description="Name of the backbone.")
    input: str = Field(description="What the backbone is for: `drawing` or `photograph`.")
    tasks: list[dict[str, Any]] = Field(description="The lessons, as in the model file.")
    can_undo: bool = Field(description="Whether there is an earlier version.")
    can_redo: bool = Field(description="Whether there is an undone version.")
    can_reject: bool = Field(description="Whether `unknown=auto` works at its default rate.")
    missing_images: int = Field(
        description="Images that must be learned until `unknown=auto` works."
    )
    learning: bool = Field(description="Whether a lesson is running.")
    temporary: bool = Field(description="Whether the model is deleted when the service stops.")
    models: list[ModelLink] = Field(description="All models of this service.")


class Problem(BaseModel):
    """Problem details as in RFC 9457."""

    type: str = Field(default="about:blank", description="Always `about:blank`.")
    title: str = Field(description="Name of the HTTP status.")
    status: int = Field(description="HTTP status.")
    detail: str = Field(description="What went wrong, for people.")


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 503, 504)
}

# Bodies are read in requests.py, which has limits that FastAPI has not, and declared here.
_BODIES: tuple[type[Body], ...] = (
    *(PredictRequest, LearnRequest),
    *(RenameRequest, MergeClassesRequest, ForgetRequest),
)


def json_body(model: type[Body], form: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the OpenAPI entry of a body: JSON, or also a form with these properties."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    content: dict[str, Any] = {"application/json": {"schema": reference}}
    if form is not None:
        content["multipart/form-data"] = {"schema": {"type": "object", **form}}
    return {"requestBody": {"content": content, "required": True}}


_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
PREDICT_BODY = json_body(PredictRequest, {"properties": {"images": _FILES}, "required": ["images"]})
LEARN_BODY = json_body(
    LearnRequest,
    {
        "properties": {
            "images": _FILES,
            "labels": {"type": "array", "items": {"type": "string"}},
            "archive": {
                "type": "string",
                "format": "binary",
                "description": "A zip file with one folder per class, instead of images and "
                "labels.",
            },
        }
    },
)


def add_request_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Add the models that `json_body` refers to to an OpenAPI document."""
    _, schema = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )
    document["components"]["schemas"].update(schema["$defs"])
    return document
