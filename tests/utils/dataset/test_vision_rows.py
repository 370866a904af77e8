"""Rows with images and videos: what an item holds, and what each bad row is answered with."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from transformers import Gemma3Processor

from examples.tiny_model import VL_KINDS, tiny_vl_config, vision_tokenizer, vl_processor
from verl.errors import DataError, PromptTooLongError
from verl.protocol import DataProto
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.files import ColumnCheck, check_vision_rows
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.vision_utils import (
    MediaError,
    check_image,
    kinds_of,
    load_video,
    process_image,
    process_video,
    smart_resize,
)
from verl.utils.tokenizer import hf_processor

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    return {kind: vl_processor(kind, vision_tokenizer(kind)) for kind in VL_KINDS}


def picture(seed: int = 0, width: int = 84, height: int = 56) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def as_row(content: Any, images: Any = None, videos: Any = None) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": "hiyouga/geometry3k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "images": images,
        "videos": videos,
    }


def clip(frames: int = 4) -> dict[str, Any]:
    pixels = {"min_pixels": 56 * 56, "max_pixels": 84 * 84}
    return {"video": [{"bytes": encoded(picture(i, 64, 64))} for i in range(frames)], "sample_fps": 4.0, **pixels}


MIXED = [
    as_row("text only"),
    as_row("what is <image>?", [{"bytes": encoded(picture())}]),
    as_row("<image> or <image> ", [{"bytes": encoded(picture(1))}, {"bytes": encoded(picture(2, 112, 112))}]),
    as_row("<image>and a <video>", [{"bytes": encoded(picture(3))}], [clip()]),
]


def build(processor: Any, files: Any, **config: Any) -> RLHFDataset:
    settings = {"max_prompt_length": 256, "filter_overlong_prompts": False, **config}
    return RLHFDataset(files, processor.tokenizer, settings, processor)


@pytest.mark.parametrize("kind", VL_KINDS)
def test_items_are_what_processor_and_model_of_transformers_make(kind: str, processors: Any, parquet: Any) -> None:
    import transformers

    processor = processors[kind]
    dataset = build(processor, parquet(MIXED))
    with torch.device("meta"):
        config = tiny_vl_config(kind, processor.tokenizer)
        model = getattr(transformers, f"{VL_KINDS[kind]}Model")(config)
    for index, source in enumerate(MIXED):
        item = dataset[index]
        images = [
            process_image(entry["bytes"], processor.image_processor.patch_size) for entry in source["images"] or []
        ]
        videos = [
            load_video(entry, image_patch_size=processor.image_processor.patch_size) for entry in source["videos"] or []
        ]
        parts = {"<image>": {"type": "image"}, "<video>": {"type": "video"}}
        pieces = source["prompt"][0]["content"].replace("<", "|<").replace(">", ">|").split("|")
        content = [parts.get(piece, {"type": "text", "text": piece}) for piece in pieces if piece]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        extra = {"videos": [v[0] for v in videos], "video_metadata": [v[1] for v in videos]} if videos else {}
        expected = processor(text=[text], images=images or None, do_sample_frames=False, return_tensors="pt", **extra)
        mask, ids = item["attention_mask"].bool(), expected.pop("input_ids")
        length = ids.shape[1]
        assert mask.tolist() == [False] * (256 - length) + [True] * length
        assert item["input_ids"][mask].tolist() == ids[0].tolist()
        assert item["raw_prompt_ids"] == processor.tokenizer(text)["input_ids"]
        # positions
        grids = {
            name: expected[name]
            for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            if name in expected
        }
        kinds = expected.pop("mm_token_type_ids")
        positions, _ = model.get_rope_index(ids, kinds, attention_mask=torch.ones_like(ids), **grids)
        assert torch.equal(item["position_ids"][1:, mask], positions[:, 0])
        assert item["position_ids"][0, mask].tolist() == list(range(length))
        # the two halves
        inputs = {
            name: value for name, value in expected.items() if name not in ("attention_mask", "second_per_grid_ts")
        }
        assert item["multi_modal_inputs"].keys() == (inputs.keys() if images else set())
        assert all(torch.equal(item["multi_modal_inputs"][name], inputs[name]) for name in item["multi_modal_inputs"])
        data = item["multi_modal_data"]
        assert [image.tobytes() for image in data.get("image", [])] == [image.tobytes() for image in images]
        for (frames, metadata), (wanted, times) in zip(data.get("video", []), videos, strict=True):
            assert np.array_equal(frames, wanted.numpy()) and metadata == times
            assert (metadata["fps"], metadata["frames_indices"]) == (4.0, [0, 1, 2, 3])
        assert "images" not in item and "videos" not in item and "prompt" not in item


def test_batches_of_all_kinds_of_rows(processors: Any, parquet: Any) -> None:
    dataset = build(processors["qwen2_5_vl"], parquet(MIXED), return_raw_chat=True)
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(4)])).repeat(2, interleave=True)
    assert batch.batch["position_ids"].shape == (8, 4, 256)
    part = batch.chunk(2)[1]
    assert torch.equal(part.batch["position_ids"][1], dataset[2]["position_ids"])
    assert list(part.non_tensor_batch["multi_modal_inputs"][3]) == [
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
    ]
    assert batch.non_tensor_batch["raw_prompt"][2][0]["content"][1] == {"type": "image"}
    without = build(processors["qwen2_5_vl"], parquet(MIXED), return_multi_modal_inputs=False)[1]
    assert "multi_modal_inputs" not in without and without["multi_modal_data"]


def test_typed_content_and_no_media_columns(processors: Any, parquet: Any) -> None:
    processor = processors["qwen2_5_vl"]
    content = [{"type": "image", "text": None}, {"type": "text", "text": "?"}]
    typed = build(processor, parquet([as_row(content, [encoded(picture())])]))[0]
    marked = build(processor, parquet([as_row("<image>?", [encoded(picture())])]))[0]
    assert torch.equal(typed["input_ids"], marked["input_ids"])
    row = as_row("write an <image> tag")
    path = parquet([{key: row[key] for key in ("prompt", "data_source", "reward_model")}])
    with pytest.raises(DataError, match=r"row 0, column 'prompt': has 1 <image> markers.* or data\.image_key=null"):
        build(processor, path)
    item = build(processor, path, image_key=None)[0]
    assert "write an <image> tag" in processor.tokenizer.decode(item["raw_prompt_ids"])
    assert item["multi_modal_data"] == item["multi_modal_inputs"] == {}
    assert item["position_ids"].shape == (4, 256)


UNSEEN = {
    "markers without a column": ("a <video> here", {}, r"has 1 <video> markers, and the file has no column 'videos'"),
    "parts without a column": ([{"type": "image"}], {}, r"has 1 <image> markers, and the file has no column 'images'"),
    "parts, though markers are text": ([{"type": "image"}], {"image_key": None}, r"data\.image_key=null: name their"),
    "parts that no column holds": ([{"type": "image_url"}], {}, r"has parts of other types than text, image and video"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_media_that_no_column_holds_are_refused(case: str, processors: Any, parquet: Any) -> None:
    content, config, message = UNSEEN[case]
    rows = [as_row("a"), as_row(content)] if isinstance(content, str) else [as_row([]), as_row(content)]
    path = parquet([{key: row[key] for key in ("prompt", "data_source", "reward_model")} for row in rows])
    with pytest.raises(DataError, match=rf"row 1, column 'prompt': .*{message}"):
        build(processors["qwen2_5_vl"], path, **config)


def test_media_that_the_processor_does_not_take(parquet: Any) -> None:
    """Gemma 3 takes images only: a marker of a video is text for it, and a video is refused."""
    processor = object.__new__(Gemma3Processor)
    processor.image_processor = None
    assert kinds_of(processor) == ("image",) and kinds_of(None) == ()
    settings = DataConfig()
    texts = [as_row("a <video> tag")]
    for row, message in ((as_row("<video>", None, [clip()]), "holds videos, which"), (as_row("<image>"), "markers")):
        check = ColumnCheck("a", pa.Table.from_pylist([{k: v for k, v in row.items() if v is not None}]))
        with pytest.raises(DataError, match=message):
            check_vision_rows(check, settings, kinds_of(processor), "prompt")
    check_vision_rows(ColumnCheck("a", pa.Table.from_pylist(texts)), settings, kinds_of(processor), "prompt")


def test_processor_settings_reach_every_call(processors: Any, parquet: Any) -> None:
    file = parquet([as_row("<image>", [encoded(picture(0, 112, 112))])])
    processor = processors["qwen2_5_vl"]
    counts = []
    for settings in ({}, {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}):
        item = build(processor, file, mm_processor_kwargs=settings)[0]
        counts.append((item["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum().item())
    assert counts == [16, 4]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_forms_of_an_image(kind: str, tmp_path: Path) -> None:
    data = encoded(picture(), kind)
    path = tmp_path / "image"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [
        data,
        {"bytes": data},
        {"bytes": data, "path": "gone.png"},
        {"bytes": None, "path": str(path)},
        {"image": str(path)},
        str(path),
        f"file://{path}",
        url,
        Image.open(path),
    ]
    for form in forms:
        check_image(form)
        assert process_image(form).tobytes() == process_image(data).tobytes()
    assert process_image(data).size == (84, 56)
    assert process_image({"image": str(path), "resized_height": 30, "resized_width": 110}).size == (112, 28)
    assert process_image({"bytes": data, "max_pixels": 56 * 28, "min_pixels": 28 * 28}).size == (28, 28)
    clear = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    assert process_image(clear).getpixel((3, 3)) == (255, 255, 255)
    with pytest.raises(MediaError, match="bytes or a path, not both"):
        process_image({"bytes": data, "image": str(path)})
    assert process_image({"image_url": {"url": url}}).tobytes() == process_image(data).tobytes()


def noise() -> Image.Image:
    return picture(0, 100, 100)


UNREADABLE = {
    "a number": (3, "must be a PIL image, .* got int"),
    "None": (None, "must be a PIL image, .* got NoneType"),
    "an empty dict": ({}, "must have bytes, path, .* got {}"),
    "a dict of nulls": ({"bytes": None, "path": None}, "must have bytes, path, "),
    "no file": ("no/such.png", "cannot be read: .*no/such.png"),
    "a folder": ("/", "cannot be read"),
    "an empty path": ("", "cannot be read"),
    "no byte": (b"", "cannot be read: Pillow does not know"),
    "text": (b"text", "cannot be read: Pillow does not know"),
    "wrong base64": ("data:image/png;base64,AAA", "'data:image/png;base64,AAA' cannot be fetched: Incorrect padding"),
    "wrong host": ("http://exa mple/a.png", "cannot be fetched"),
    "refused": ("http://127.0.0.1:9/a.png", "'http://127.0.0.1:9/a.png' cannot be fetched"),
    "too long": (encoded(Image.new("RGB", (5000, 3))), "at most 200 times the other, got 3 x 5000"),
    "limits crossed": ({"bytes": encoded(noise()), "min_pixels": 9000, "max_pixels": 5000}, "got 9000 and 5000"),
    "negative limit": ({"bytes": encoded(noise()), "max_pixels": -5}, "got 3136 and -5"),
    "no size": (
        {"bytes": encoded(noise()), "resized_height": "a", "resized_width": 56},
        "numbers of pixels, got .*'a'",
    ),
    "cut GIF": (encoded(noise(), "GIF")[:2000], "truncated"),
    "cut BMP": (encoded(noise(), "BMP")[:2000], "truncated"),
    "cut WebP": (encoded(noise(), "WEBP")[:2000], "cannot be read"),
    "cut TIFF": (encoded(noise(), "TIFF")[:2000], "cannot be read"),
    "floats": (encoded(Image.fromarray(np.ones((56, 56), np.float32)), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_image_is_seen_without_decoding_too(case: str) -> None:
    image, message = UNREADABLE[case]
    for look in (check_image, process_image):
        with pytest.raises(MediaError, match=message):
            look(image)


def test_kinds_of_pixels() -> None:
    """What is transparent becomes white in every mode, and 16 bits are not cut off at 8."""

    def corner(image: Image.Image, kind: str = "PNG", **options: Any) -> Any:
        check_image(data := encoded(image, kind, **options))
        loaded = process_image(data)
        assert (loaded.mode, loaded.size) == ("RGB", (56, 56))
        return loaded.getpixel((3, 3))

    size = (56, 56)
    palette = Image.new("P", size, 0)
    palette.putpalette([10, 20, 30])
    assert corner(palette) == (10, 20, 30)
    white = (255, 255, 255)
    clear = [
        (Image.new("RGBA", size, (0, 0, 0, 0)), {}),
        (Image.new("LA", size, (0, 0)), {}),
        (palette, {"transparency": 0}),
        (Image.new("RGB", size, (1, 2, 3)), {"transparency": (1, 2, 3)}),
    ]
    assert [corner(image, **options) for image, options in clear] == [white] * 4
    assert corner(palette, "GIF", transparency=0) == white
    assert corner(Image.new("RGBA", size, (200, 0, 0, 51))) == (244, 204, 204)  # a fifth of the colour on white
    for kind, dtype in (("PNG", np.uint16), ("TIFF", np.int32)):
        deep = Image.fromarray(np.full(size, 0x80FF, dtype))
        assert corner(deep, kind) == (0x80, 0x80, 0x80)
    assert corner(Image.new("1", size, 1)) == white
    assert corner(Image.new("CMYK", size, (0, 0, 0, 0)), "JPEG") == white
    assert corner(Image.new("RGB", (1, 1), (7, 8, 9))) == (7, 8, 9)


def test_sizes_are_those_of_qwen_vl_utils() -> None:
    process = pytest.importorskip("qwen_vl_utils.vision_process")
    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 3000, (400, 2)).tolist():
        for limits in ((None, None), (56 * 56, 448 * 448)):
            try:
                expected = process.smart_resize(height, width, 28, *limits)
            except ValueError:
                with pytest.raises(MediaError, match="at most 200 times"):
                    smart_resize(height, width, 28, *limits)
                continue
            if min(expected) > 0:  # it makes an image without pixels of one that is long
                assert smart_resize(height, width, 28, *limits) == expected
    for patch in (14, 16):
        ours, theirs = (
            process_image(picture(0, 90, 75), patch),
            process.fetch_image({"image": picture(0, 90, 75)}, patch),
        )
        assert ours.tobytes() == theirs.tobytes()


def test_videos(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    pytest.importorskip("qwen_vl_utils")
    path = str(tmp_path / "clip.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for shade in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    pixels = {"min_pixels": 56 * 56, "max_pixels": 56 * 56}
    frames, metadata = load_video({"video": path, "fps": 2.0, **pixels})
    assert torch.equal(process_video({"video": path, "fps": 4.0, **pixels}, fps=2.0), frames)
    assert frames.shape == (6, 3, 56, 56) and frames.dtype == torch.uint8
    assert [round(shade / 20) for shade in frames.float().mean(dim=(1, 2, 3)).tolist()] == [0, 2, 4, 7, 9, 11]
    assert metadata["frames_indices"] == [0, 2, 4, 7, 9, 11]
    assert (metadata["fps"], metadata["total_num_frames"], metadata["duration"]) == (4.0, 12, 3.0)
    assert len(load_video({"video": path, "nframes": 4, **pixels})[0]) == 4
    assert torch.equal(process_video({"video": path, **pixels}, 4), load_video({"video": path, **pixels}, 4)[0])
    square = {"video": path, "min_pixels": 64 * 64, "max_pixels": 64 * 64}
    few = load_video(square, fps=4.0, fps_min_frames=4, fps_max_frames=8, image_patch_size=16)[0]
    assert few.shape == (8, 3, 64, 64)
    assert process_video(square, image_patch_size=16).shape == (6, 3, 64, 64)
    with pytest.raises(NotImplementedError, match='{"video"'):
        load_video({"frames": []})
    for wrong, message in (
        ({"video": path, "nframes": 4, "fps": 1.0}, "nframes or fps"),
        ({"video": "no/such.mp4"}, "cannot be read"),
        ({"video": []}, "no frame"),
        ({"video": path, "nframes": 40}, "has 12 frames"),
        ({"video": [picture(), picture(0, 56, 56)]}, r"one size, got \[\(56, 56\), \(84, 56\)\]"),
        ({"video": [picture()] * 2, "fps": 0.0}, "fps and sample_fps of a video must be positive, got 0.0"),
        ({"video": [picture()] * 2, "min_pixels": 90000, "max_pixels": 5000}, "at most max_pixels, got 90000 and 5000"),
    ):
        with pytest.raises(MediaError, match=message):
            load_video(wrong)


GOOD = as_row("<image>", [{"bytes": encoded(picture())}])
JPEG = encoded(picture(0, 200, 200), "JPEG")
BAD = {
    "corrupt": (as_row("<image>", [{"bytes": b"no image"}]), "entry 0: the image cannot be read"),
    "cut PNG": (as_row("<image>", [{"bytes": encoded(picture())[:500]}]), "entry 0: the image cannot be read"),
    "cut JPEG": (as_row("<image>", [{"bytes": JPEG[: len(JPEG) // 2]}]), "entry 0: .* truncated"),
    "no image": (as_row("<image>", []), "holds 0 images, but column 'prompt' has 1 <image> markers"),
    "null image": (as_row("<image><image>"), "holds 0 images, but column 'prompt' has 2 <image> markers"),
    "no place": (
        as_row("?", [{"bytes": encoded(picture())}]),
        "holds 1 images, but column 'prompt' has 0 <image> markers",
    ),
    "too many": (
        as_row("<image><image><image>", [{"bytes": encoded(picture())}] * 3),
        r"holds 3 images, more than actor_rollout_ref\.rollout\.limit_images=2",
    ),
    "too long": (as_row("<image>", [{"bytes": encoded(Image.new("RGB", (900, 3)))}]), "entry 0: one side .* 3 x 900"),
    "no entry": (as_row("<image>", [None]), "entry 0: .* got NoneType"),
}
BAD_VIDEOS = {
    "no file": (as_row("<video>", [], [{"video": "no/such.mp4"}]), "entry 0: the video 'no/such.mp4' .* no such file"),
    "a path": (as_row("<video>", [], ["no/such.mp4"]), r'entry 0: a video must be a dict such as \{"video": path'),
    "a corrupt frame": (as_row("<video>", [], [{"video": [b"no image"]}]), "entry 0: the image cannot be read"),
    "no place": (as_row("?", [], [clip()]), "holds 1 videos, but column 'prompt' has 0 <video> markers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named_at_load(case: str, processors: Any, parquet: Any) -> None:
    row, message = BAD[case]
    files = [parquet([GOOD], "first.parquet"), parquet([GOOD, row], "second.parquet")]
    with pytest.raises(DataError, match=rf"second\.parquet, row 1, column 'images' \(data\.image_key\): {message}"):
        build(processors["qwen2_5_vl"], files, limit_images=2)


@pytest.mark.parametrize(("kind", "limit"), [("image", 0), ("video", 0), ("video", {"count": 0, "num_frames": 4})])
def test_limits_among_the_settings_of_the_engine(kind: str, limit: Any, processors: Any, parquet: Any) -> None:
    """Its other name of the number of images, and the only one of videos, under which rows are named at load too."""
    message = (
        rf"row 3, .* holds 1 {kind}s, more than actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.limit_mm_per_prompt"
    )
    rows = [MIXED[0], MIXED[0], MIXED[0], MIXED[3]]
    with pytest.raises(DataError, match=message):
        build(processors["qwen2_5_vl"], parquet(rows), limit_mm_per_prompt={kind: limit})
    assert len(build(processors["qwen2_5_vl"], parquet(rows), limit_mm_per_prompt={"image": 1, "video": None})) == 4


@pytest.mark.parametrize("case", BAD_VIDEOS)
def test_bad_videos_are_named_at_load(case: str, processors: Any, parquet: Any) -> None:
    row, message = BAD_VIDEOS[case]
    with pytest.raises(DataError, match=rf"train\.parquet, row 0, column 'videos' \(data\.video_key\): {message}"):
        build(processors["qwen2_5_vl"], parquet([row]))


def test_rows_name_what_the_configuration_refuses(processors: Any, parquet: Any) -> None:
    path = parquet([as_row("a"), as_row("<image>", [encoded(picture(), "ICO")])])
    with pytest.raises(DataError, match=r"row 1, column 'images' .*entry 0: .*its format is ICO"):
        build(processors["qwen2_5_vl"], path)
    assert len(build(processors["qwen2_5_vl"], path, media={"image_formats": ["ICO"]})) == 2
    with pytest.raises(DataError, match=r"row 1, .*48 x 32 pixels, and data\.media\.max_pixels=99"):
        build(processors["qwen2_5_vl"], path, media={"image_formats": ["ICO"], "max_pixels": 99})
    with pytest.raises(ValueError, match="max_pixels=0"):
        build(processors["qwen2_5_vl"], path, media={"max_pixels": 0})


@pytest.mark.parametrize("column", ["images", None])
def test_files_without_the_column_of_images(column: str | None, processors: Any, parquet: Any) -> None:
    """Their rows are rows of text, in which a marker has no image, unless no file has the column."""
    plain = {key: value for key, value in as_row("a <b>").items() if key not in ("images", "videos")}
    literal = plain | {"prompt": [{"role": "user", "content": "an <image> tag"}]}
    shown = GOOD if column else plain
    files = [parquet([plain], "text.parquet"), parquet([shown], "images.parquet")]
    for order in (files, files[::-1]):
        kinds = [bool(item["multi_modal_inputs"]) for item in build(processors["qwen2_5_vl"], order)]
        assert sorted(kinds) == [False, column is not None]
    files[0] = parquet([literal], "text.parquet")
    found = "'images' .* holds 0 images, but .*" if column else "'prompt':"
    with pytest.raises(DataError, match=rf"text\.parquet, row 0, column {found} has 1 <image> markers"):
        build(processors["qwen2_5_vl"], files)


def test_rows_that_only_decoding_shows_to_be_bad(processors: Any, parquet: Any) -> None:
    odd = as_row("<video>", [], [{"video": [encoded(picture()), encoded(picture(0, 56, 56))]}])  # each frame is whole
    files = [parquet([GOOD], "first.parquet"), parquet([GOOD, odd], "second.parquet")]
    message = r"second\.parquet, row 1, column 'videos': entry 0: the frames of a video must have one size"
    with pytest.raises(DataError, match=message):
        build(processors["qwen2_5_vl"], files)[2]
    with pytest.raises(DataError, match=message):
        build(processors["qwen2_5_vl"], files, filter_overlong_prompts=True)
    literal = as_row("<image> <|image_pad|>", [{"bytes": encoded(picture())}])
    with pytest.raises(DataError, match=r"train\.parquet, row 0, the processor rejects"):
        build(processors["qwen2_5_vl"], parquet([literal]))[0]


def test_filter_counts_the_tokens_of_images(processors: Any, parquet: Any) -> None:
    processor = processors["qwen2_5_vl"]
    dataset = build(processor, parquet(MIXED))
    lengths = [int(dataset[i]["attention_mask"].sum()) for i in range(4)]
    assert lengths[2] > lengths[1] > lengths[0]
    filtered = build(processor, parquet(MIXED), filter_overlong_prompts=True, max_prompt_length=lengths[1])
    assert [int(filtered[i]["attention_mask"].sum()) for i in range(len(filtered))] == lengths[:2]
    short = build(processor, parquet(MIXED), max_prompt_length=lengths[1] - 1, truncation="left")
    with pytest.raises(PromptTooLongError, match=rf"row 1, column 'prompt': the prompt has {lengths[1]} tokens"):
        short[1]


WITHOUT_TORCHVISION = """
import json, sys
sys.modules["torchvision"] = None
from verl.utils import hf_processor
from verl.utils.dataset.rl_dataset import RLHFDataset
item = {}
for _ in range(2):
    processor = hf_processor(sys.argv[1])
    item = RLHFDataset(sys.argv[2], processor.tokenizer, {"max_prompt_length": 64}, processor)[0]
    processor.save_pretrained(sys.argv[1])
print(json.dumps({
    "ids": item["input_ids"].tolist(),
    "positions": item["position_ids"].tolist(),
    "pixels": item["multi_modal_inputs"]["pixel_values"].tolist(),
}))
"""


def test_why_a_model_that_sees_has_no_processor_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of text never has one, and nothing is said."""
    for config, count in (({"model_type": "qwen2"}, 0), ({"model_type": "qwen2_5_vl", "vision_config": {}}, 1)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert hf_processor(str(tmp_path)) is None
        told = [
            record for record in caplog.records if record.levelname == "WARNING" and "no processor in" in record.msg
        ]
        assert len(told) == count


def test_images_need_no_torchvision(processors: Any, parquet: Any, tmp_path: Path) -> None:
    processor, file = processors["qwen2_5_vl"], parquet([GOOD])
    processor.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", WITHOUT_TORCHVISION, str(tmp_path / "model"), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, item = json.loads(done.stdout.splitlines()[-1]), build(processor, file, max_prompt_length=64)[0]
    assert (found["ids"], found["positions"]) == (item["input_ids"].tolist(), item["position_ids"].tolist())
    pixels = torch.tensor(found["pixels"])
    torch.testing.assert_close(pixels, item["multi_modal_inputs"]["pixel_values"], atol=1e-5, rtol=0)
    assert "takes images but no videos" in done.stderr
