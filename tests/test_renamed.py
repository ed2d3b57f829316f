"""Old names of options and arguments work for one version and warn."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from drawings import drawings, taught
from typer.testing import CliRunner

from coda_prompt import cli
from coda_prompt.data.pocket import pocket_source
from coda_prompt.model.catalog import load_backbone


def test_learn_with_watch_is_learn_with_check() -> None:
    check = list(zip(*drawings([0, 1], 4, test=True), strict=True))
    with pytest.warns(FutureWarning, match=r"learn\(check=...\)"):
        watched = taught([0, 1]).learn(*drawings([2], 5), watch=check)
    assert watched.forgotten is not None
    assert watched.forgotten == taught([0, 1]).learn(*drawings([2], 5), check=check).forgotten


def test_load_backbone_with_like_is_the_named_backbone() -> None:
    path = str(resources.files("coda_prompt") / "assets" / "pocket-vit.safetensors")
    with pytest.warns(FutureWarning, match="pocket="):
        old = load_backbone(path, like="pocket")
    assert old.fingerprint == load_backbone(f"pocket={path}").fingerprint


def test_coda_learn_watch_is_check(tmp_path: Path) -> None:
    source = pocket_source()
    for number, label in enumerate(source.train.labels[:400]):
        folder = tmp_path / "photos" / source.class_names[label]
        if len(list(folder.glob("*"))) < 6 and label < 2:
            folder.mkdir(parents=True, exist_ok=True)
            source.train.image(number).save(folder / f"{number}.png")
    arguments = ["learn", str(tmp_path / "model"), str(tmp_path / "photos"), "--backbone", "pocket"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    done = CliRunner().invoke(cli.app, [*arguments, "--watch", str(tmp_path / "photos"), "--json"])
    assert done.exit_code == 0, done.output
    assert "--watch is called --check now" in done.stderr
    assert '"forgotten"' in done.stdout
