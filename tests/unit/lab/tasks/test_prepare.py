"""Preparations, on miniatures of the public sources; the built-in tasks read what they write."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.lab.prepare import femnist, hc18, heart, isic, pcam, retina
from lightyear_node.lab.prepare.__main__ import SETS
from lightyear_node.lab.prepare.arrays import Arrays, save, split_by_group
from lightyear_node.lab.tasks import BUILT_IN
from lightyear_node.worker.task import Task, load_task
from tests.support.paths import DOCS, ROOT

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
Stored = Callable[[str], dict[str, np.ndarray]]
RNG = np.random.default_rng(0)


def picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def tasks_on(folder: Path, name: str, **arguments: Any) -> list[Task]:
    """The built-in task of every client, on the prepared files."""
    entry = BUILT_IN[name]
    return [
        load_task(
            entry.entry,
            {"data": str(folder), **arguments},
            {"site_index": index, "site_count": entry.clients},
        )
        for index in range(entry.clients)
    ]


def sample_count(tasks: list[Task]) -> int:
    parts = [part for task in tasks for part in (task.train_data, task.val_data, task.test_data)]
    assert all(len(part.dataset) > 0 for part in parts)  # type: ignore[union-attr]
    return sum(len(part.dataset) for part in parts)  # type: ignore[union-attr]


def test_splits_keep_groups_together_and_have_their_shares() -> None:
    client = np.repeat(np.arange(3, dtype=np.uint8), [1000, 500, 50])
    group = np.arange(len(client)) // 4
    split = split_by_group(client, group)
    for number in np.unique(group):
        assert len(set(split[group == number])) == 1
    for number, size in enumerate((1000, 500, 50)):
        shares = np.bincount(split[client == number], minlength=3) / size
        assert shares == pytest.approx([0.7, 0.1, 0.2], abs=4 / size)
    assert np.array_equal(split, split_by_group(client, group))


class TestHeart:
    def test_the_prepared_file_is_made_of_the_public_ones(
        self, tmp_path: Path, data: str, stored: Stored
    ) -> None:
        """The table beside the prepared file has the lines of UCI's four files."""
        with Path(data, "heart_disease", "heart_disease.csv").open(newline="") as file:
            _, *rows = csv.reader(file)
        hospitals = list(dict.fromkeys(row[0] for row in rows))
        for hospital, name in zip(hospitals, heart.HOSPITALS, strict=True):
            lines = [",".join(v or "?" for v in row[1:]) for row in rows if row[0] == hospital]
            (tmp_path / f"processed.{name}.data").write_text("\n".join(lines) + "\n")
        made, known = heart.prepare(tmp_path)[heart.FILE], stored(heart.FILE)
        assert made.keys() == known.keys()
        for name in made.keys() - {"client_names"}:
            np.testing.assert_array_equal(made[name], known[name], err_msg=name)
            assert made[name].dtype.kind == known[name].dtype.kind

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"there is no processed\.cleveland\.data"):
            heart.prepare(tmp_path)

    def test_the_command_writes_a_file_that_the_task_reads(self, tmp_path: Path) -> None:
        source, out = tmp_path / "source", tmp_path / "out"
        source.mkdir()
        for name in heart.HOSPITALS:
            lines = [
                f"{40 + n},1,2,130,{n % 2 * 200},?,0,150,0,1.5,2,?,3,{n % 5}" for n in range(30)
            ]
            (source / f"processed.{name}.data").write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "lightyear_node.lab.prepare", "heart"]

        def run(folder: Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, str(folder), "--out", str(out)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )

        ended = run(source)
        assert (ended.returncode, ended.stdout) == (0, f"{out / heart.FILE}\n"), ended.stderr
        assert sample_count(tasks_on(out, "heart")) == 4 * 30
        refused = run(tmp_path)
        assert refused.returncode == 78
        assert "there is no processed.cleveland.data" in refused.stderr


class TestFemnist:
    def leaf(self, folder: Path, writers: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Files as LEAF writes them: 90 % of a writer in `train`, the rest in `test`."""
        for part in ("train", "test"):
            content = {}
            for name, (images, labels) in writers.items():
                cut = int(0.9 * len(labels))
                rows = slice(0, cut) if part == "train" else slice(cut, None)
                x = images[rows].reshape(-1, 784) / 255
                content[name] = {"x": x.tolist(), "y": labels[rows].tolist()}
            sizes = [len(one["y"]) for one in content.values()]
            shard = {"users": list(content), "num_samples": sizes, "user_data": content}
            (folder / part).mkdir(exist_ok=True)
            for number in range(2):  # the second repeats the first
                (folder / part / f"all_data_{number}_niid.json").write_text(json.dumps(shard))

    def test_writers_are_whole_and_images_are_those_of_the_source(
        self, tmp_path: Path, stored: Stored
    ) -> None:
        known = stored(femnist.FILE)
        chosen = np.argsort(np.bincount(known["writer"]))[-16:]
        writers = {}
        for number in chosen:
            rows = known["writer"] == number
            writers[known["writer_names"][number].decode()] = (
                known["images"][rows],
                known["labels"][rows],
            )
        self.leaf(tmp_path, writers)
        made = femnist.prepare(tmp_path)[femnist.FILE]
        assert made["classes"].tolist() == known["classes"].tolist()
        for number, name in enumerate(made["writer_names"]):
            rows = made["writer"] == number
            assert len(set(made["client"][rows])) == 1
            expected = {
                (image.tobytes(), label)
                for image, label in zip(*writers[name.decode()], strict=True)
            }
            pairs = zip(made["images"][rows], made["labels"][rows], strict=True)
            assert {(image.tobytes(), label) for image, label in pairs} == expected
        assert np.bincount(made["client"]).min() > 0.8 * np.bincount(made["client"]).max()
        save(tmp_path, {femnist.FILE: made})
        tasks = tasks_on(tmp_path, "femnist", network="small")
        assert sample_count(tasks) == len(made["labels"])


class TestHc18:
    def test_outlines_become_masks_and_subjects_stay_together(self, tmp_path: Path) -> None:
        lines = ["filename,pixel size(mm),head circumference (mm)"]
        for number in range(60):
            for name in [f"{number:03}_HC.png"] + [f"{number:03}_2HC.png"] * (number % 3 == 0):
                picture(
                    tmp_path / "training_set" / name,
                    RNG.integers(0, 256, (135, 200), dtype=np.uint8),
                )
                outline = Image.new("L", (200, 135))
                ImageDraw.Draw(outline).ellipse((50, 35, 150, 100), outline=255)
                outline.save(tmp_path / "training_set" / name.replace(".", "_Annotation."))
                lines.append(f"{name},0.1,{100 + number}")
        (tmp_path / hc18.TABLE).write_text("\n".join(lines) + "\n")
        made = hc18.prepare(tmp_path)[hc18.FILE]
        assert made["images"].shape == made["masks"].shape == (80, 64, 64)
        # The area of the ellipse, as a share of the picture.
        area = np.pi * 50 * 32.5 / (200 * 135)
        assert made["masks"].mean(axis=(1, 2)) == pytest.approx(np.full(80, area), rel=0.05)
        for subject in range(60):
            rows = made["subject"] == subject
            assert rows.sum() == 1 + (subject % 3 == 0)
            assert len(set(made["client"][rows])) == len(set(made["split"][rows])) == 1
        assert np.bincount(made["client_hc"]).tolist() == pytest.approx([16] * 5, abs=1)
        save(tmp_path, {hc18.FILE: made})
        assert sample_count(tasks_on(tmp_path, "hc18", network="small")) == 80


class TestIsic:
    def test_images_are_joined_with_their_centres(self, tmp_path: Path) -> None:
        rows = ["image,target,center,fold,fold2"]
        for number in range(72):
            centre, fold = number % 6, "test" if number % 5 == 4 else "train"
            name = f"ISIC_{number:07}"
            rows.append(f"{name},{number % 8},{centre},{fold},{fold}_{centre}")
            if number:  # the first image is missing in the source
                pixels = np.full((90, 120, 3), 3 * number, dtype=np.uint8)
                path = tmp_path / "ISIC_2019_Training_Input" / f"{name}.jpg"
                picture(path, pixels)
        (tmp_path / "train_test_split").write_text("\n".join(rows) + "\n")
        prepared = isic.prepare(tmp_path)
        full, few = prepared[isic.FULL_FILE], prepared[isic.FILE]
        assert full["isic_id"].tolist() == list(range(1, 72))
        assert (full["client"] == full["isic_id"] % 6).all()
        assert (full["labels"] == full["isic_id"] % 8).all()
        for row in (0, 70):
            blob = full["jpeg"][full["offset"][row] : full["offset"][row + 1]].tobytes()
            image = np.asarray(Image.open(io.BytesIO(blob)))
            assert image.shape == (84, 84, 3)
            assert abs(image.astype(int) - 3 * (row + 1)).max() <= 2
        assert few["images"].shape == (len(few["labels"]), 64, 64, 3)
        assert ((few["labels"] == 0) == (few["melanoma"] == 1)).all()
        save(tmp_path, prepared)
        assert sample_count(tasks_on(tmp_path, "isic", network="small")) == len(few["labels"])
        assert sample_count(tasks_on(tmp_path, "isic", network="small", full=True)) == 71

    def test_half_of_a_large_centre_is_not_nevi(self) -> None:
        labels = np.array([1] * 900 + [0] * 100 + [1] * 1000 + [2] * 20, dtype=np.uint8)
        columns: Arrays = {
            "labels": labels,
            "client": np.repeat(np.array([0, 1], dtype=np.uint8), [1000, 1020]),
            "split": np.zeros(2020, dtype=np.uint8),
        }
        rows = isic.subset(columns)
        chosen = [labels[rows[columns["client"][rows] == centre]] for centre in (0, 1)]
        assert [np.bincount(one, minlength=3).tolist() for one in chosen] == [
            [80, 80, 0],
            [0, 140, 20],
        ]


class TestPcam:
    def test_patches_are_grouped_by_stain(self, tmp_path: Path) -> None:
        lines = ["id,label"]
        for number in range(400):
            # Purple patches have dense blue; brown-pink ones do not.
            colour = (150, 90, 160) if number % 2 else (180, 110, 90)
            noise = RNG.integers(-30, 31, (96, 96, 3))
            patch = np.clip(np.array(colour) + noise + number % 7, 0, 255).astype(np.uint8)
            picture(tmp_path / "train" / f"{number:040x}.tif", patch)
            lines.append(f"{number:040x},{number // 2 % 2}")
        blank = np.full((96, 96, 3), 255, dtype=np.uint8)
        picture(tmp_path / "train" / f"{400:040x}.tif", blank)
        (tmp_path / "train_labels.csv").write_text("\n".join([*lines, f"{400:040x},0"]) + "\n")
        prepared = pcam.prepare(tmp_path)
        full, few = prepared[pcam.FULL_FILE], prepared[pcam.FILE]
        assert len(full["labels"]) == 400  # without the blank one
        number = np.array([int(name, 16) for name in full["patch_id"].tolist()])
        assert (full["labels"] == number // 2 % 2).all()
        assert (full["stain_domain"] == np.where(number % 2, 0, 1)).all()
        assert set(full["client"][full["stain_domain"] == 0]) == {0, 1, 2}
        assert set(full["client"][full["stain_domain"] == 1]) == {3, 4}
        assert few["images"].shape[1:] == (48, 48, 3)
        save(tmp_path, prepared)
        assert sample_count(tasks_on(tmp_path, "pcam", network="small")) == len(few["labels"])
        assert sample_count(tasks_on(tmp_path, "pcam", network="small", full=True)) == 400


class TestRetina:
    def test_photographs_become_tiles_of_the_retina(self, tmp_path: Path) -> None:
        def photograph(image: Path, manual: Path, side: int) -> None:
            """A gray disc on black, with a bright cross as vessels."""
            disc, vessels = Image.new("L", (side, side)), Image.new("L", (side, side))
            ImageDraw.Draw(disc).ellipse((10, 10, side - 10, side - 10), fill=90)
            for box in ((side // 2 - 4, 20, side // 2 + 4, side - 20),):
                ImageDraw.Draw(vessels).rectangle(box, fill=255)
            picture(image, np.repeat(np.asarray(disc)[..., None], 3, axis=2))
            picture(manual, np.asarray(vessels))

        for number in range(1, 11):
            drive = tmp_path / "DRIVE" / ("test" if number < 5 else "training")
            kind = drive.name
            photograph(
                drive / "images" / f"{number:02}_{kind}.tif",
                drive / "1st_manual" / f"{number:02}_manual1.gif",
                300,
            )
            stare = tmp_path / "STARE" / f"im{number:04}.ppm"
            photograph(stare, stare.with_suffix(".ah.ppm"), 320)
            chase = tmp_path / "CHASE_DB1" / f"Image_{number:02}L.jpg"
            photograph(chase, chase.with_name(f"{chase.stem}_1stHO.png"), 400)
        made = retina.prepare(tmp_path)[retina.FILE]
        assert made["images"].shape[1:] == made["masks"].shape[1:] == (64, 64)
        # Sixteen tiles of a square, without those of the corners.
        per_image = np.bincount(made["source_image"])
        assert per_image.tolist() == [12] * 30
        assert np.bincount(made["client"]).tolist() == [120] * 3
        assert set(np.unique(made["masks"])) == {0, 1}
        assert 0.01 < made["masks"].mean() < 0.1
        for source in range(30):
            assert len(set(made["split"][made["source_image"] == source])) == 1
        save(tmp_path, {retina.FILE: made})
        assert sample_count(tasks_on(tmp_path, "retina")) == 360


def documented(name: str) -> dict[str, dict[str, str]]:
    """The types of the arrays of each file of a set, from docs/data.md."""
    part = re.split(rf"^## {name}$", (DOCS / "data.md").read_text(), flags=re.MULTILINE)[1]
    part = part.split("\n## ")[0]
    table: dict[str, str] = {}
    for keys, kinds in re.findall(r"^\| (`.*?`) \| ([^|]+) \|", part, re.MULTILINE):
        arrays, types = re.findall(r"`(\w+)`", keys), kinds.strip().split(", ")
        types = types * len(arrays) if len(types) == 1 else types
        table |= dict(zip(arrays, types, strict=True))
    return dict.fromkeys(re.findall(r"`(\w+/\w+\.npz)`", part), table)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"digits"}))
def test_the_page_lists_every_array_of_every_prepared_file(name: str, stored: Stored) -> None:
    entry, files = BUILT_IN[name], documented(name)
    assert files.keys() == {*entry.files, *entry.full_files}
    union: dict[str, str] = {}
    for file in files:
        arrays = stored(file)
        kinds = {k: "bytes" if a.dtype.kind == "S" else str(a.dtype) for k, a in arrays.items()}
        union |= kinds
    for table in files.values():
        assert table == union


def test_every_set_but_the_x_rays_has_a_script() -> None:
    assert set(BUILT_IN) - set(SETS) == {"digits", "cxr_lungs"}
    assert set(SETS) <= set(BUILT_IN)
