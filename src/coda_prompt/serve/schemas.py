"""Requests and responses of the HTTP service as pydantic models, and their OpenAPI entries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from coda_prompt.serve.uploads import MAX_IMAGES_LEARN, MAX_IMAGES_PREDICT


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ImageData(Body):
    data: str = Field(description="An image file as base64 or as a data URL.")


class LabelledImageData(ImageData):
    label: str = Field(description="Class name.")


class PredictRequest(Body):
    images: list[ImageData] = Field(
        min_length=1, max_length=MAX_IMAGES_PREDICT, description="The images."
    )


class LearnRequest(Body):
    images: list[LabelledImageData] = Field(
        min_length=1, max_length=MAX_IMAGES_LEARN, description="The images with their classes."
    )


class Candidate(BaseModel):
    label: str = Field(description="Class name.")
    probability: float = Field(description="Its calibrated probability.")


class Prediction(BaseModel):
    label: str | None = Field(description="The most likely class; null if `unknown`.")
    unknown: bool = Field(
        description="Whether `typicality` is below `unknown_rate` (with `unknown=auto`) or "
        "`probability` below `unknown_below`."
    )
    best: str = Field(description="The most likely class, unknown or not.")
    probability: float = Field(description="The probability of `best`.")
    top: list[Candidate] = Field(description="The most likely classes in descending order.")
    typicality: float | None = Field(
        description="Share of images of the learned classes that look no more typical of them; "
        "null without `unknown=auto`."
    )


class Predictions(BaseModel):
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


class Neighbour(BaseModel):
    label: str = Field(description="Class name.")
    distance: float | None = Field(
        description="Cosine distance to the class; null if the method has no such measure."
    )
    probability: float = Field(description="Probability of the class.")


class PromptWeights(BaseModel):
    block: int = Field(description="Block of the ViT, counted from 0.")
    weights: list[float] = Field(description="How much each prompt contributes.")


class ExplanationAnswer(BaseModel):
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


class HeldOutClass(BaseModel):
    label: str = Field(description="Class name.")
    images: int = Field(description="Held-out images of the class.")
    accuracy: float = Field(description="Among all classes that were known after their lesson.")


class ConfusedPair(BaseModel):
    true: str = Field(description="The class the images belong to.")
    predicted: str = Field(description="The class that was predicted.")
    images: int = Field(description="Held-out images that were confused.")
    share: float = Field(description="Of the held-out images of the true class.")


class HeldOutAccuracy(BaseModel):
    version: str = Field(description="The current model version.")
    classes: list[HeldOutClass] = Field(description="Classes that had held-out images.")
    confused: list[ConfusedPair] = Field(description="Most confused pairs first.")


class ModelInfo(BaseModel):
    version: str = Field(description="The current model version.")
    method: str = Field(description="Name of the method.")
    backbone: str = Field(description="Name of the backbone.")
    input: str = Field(description="What the backbone is for: `drawing` or `photograph`.")
    tasks: list[dict[str, Any]] = Field(description="The lessons, as in the model file.")
    can_undo: bool = Field(description="Whether there is an earlier version.")
    can_redo: bool = Field(description="Whether there is an undone version.")
    can_reject: bool = Field(description="Whether `unknown=auto` works at its default rate.")
    missing_images: int | None = Field(
        description="Images that must be learned until `unknown=auto` works; null if the model was "
        "made by an earlier version, which stored no statistics for it."
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

# FastAPI declares one content type per route. These routes accept JSON or a form, so the body is
# read in requests.py and declared here.


def _request_body(
    model: type[BaseModel], form: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    form_schema = {"type": "object", "properties": form, "required": required}
    content = {
        "application/json": {"schema": reference},
        "multipart/form-data": {"schema": form_schema},
    }
    return {"requestBody": {"content": content, "required": True}}


_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
PREDICT_BODY = _request_body(PredictRequest, {"images": _FILES}, ["images"])
LEARN_BODY = _request_body(
    LearnRequest,
    {
        "images": _FILES,
        "labels": {"type": "array", "items": {"type": "string"}},
        "archive": {
            "type": "string",
            "format": "binary",
            "description": "A zip file with one folder per class, instead of images and labels.",
        },
    },
    [],
)


def add_request_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Add the models that PREDICT_BODY and LEARN_BODY refer to to an OpenAPI document."""
    _, schema = models_json_schema(
        [(PredictRequest, "validation"), (LearnRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    document["components"]["schemas"].update(schema["$defs"])
    return document
