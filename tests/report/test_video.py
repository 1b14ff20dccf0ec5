"""Films: what is written must decode again, at the promised size, length and colours."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import UserError
from qfleet.report.video import enlargement, prepare_frame, show, write_gif, write_mp4

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def solid(colour, count, height=33, width=41):
    return [np.full((height, width, 3), colour, np.uint8) for _ in range(count)]


def decoded(path):
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["source_size"]
    return meta, [np.frombuffer(raw, np.uint8).reshape(height, width, 3) for raw in reader]


def test_an_mp4_decodes_to_the_same_pictures(tmp_path):
    path = tmp_path / "deep" / "film.mp4"
    seen = []
    count = write_mp4(iter(solid((200, 30, 30), 6) + solid((20, 20, 220), 6)), path, fps=25, progress=seen.append)
    meta, pictures = decoded(path)
    assert count == 12 and seen == list(range(1, 13)) and len(pictures) == 12
    assert meta["fps"] == 25 and meta["source_size"] == (41 * 10, 33 * 10)
    assert np.abs(pictures[0].mean((0, 1)) - [200, 30, 30]).max() < 12
    assert np.abs(pictures[-1].mean((0, 1)) - [20, 20, 220]).max() < 12
    assert [p.name for p in path.parent.iterdir()] == ["film.mp4"]


def test_a_gif_holds_every_picture_and_its_pace(tmp_path):
    image = pytest.importorskip("PIL.Image")
    frames = [np.full((40, 40), 20 * index, np.uint8) for index in range(5)]
    assert write_gif(frames, tmp_path / "film.gif", fps=10) == 5
    with image.open(tmp_path / "film.gif") as film:
        assert film.n_frames == 5 and film.size == (320, 320) and film.info["duration"] == 100


@pytest.mark.parametrize(("height", "width", "factor"), [(210, 160, 2), (10, 5, 64), (400, 600, 1), (84, 84, 4),
                                                         (2000, 2000, 1), (1, 1280, 1)])
def test_small_pictures_are_enlarged_within_reason(height, width, factor):
    assert enlargement(height, width) == factor


@given(st.integers(1, 500), st.integers(1, 500), st.booleans())
def test_prepared_pictures_are_even_and_keep_their_first_pixel(height, width, grey):
    frame = np.arange(height * width, dtype=np.uint64).astype(np.uint8).reshape(height, width)
    picture = prepare_frame(frame if grey else np.stack([frame] * 3, axis=2))
    factor = enlargement(height, width)
    assert picture.shape[0] % 2 == 0 and picture.shape[1] % 2 == 0 and picture.flags.c_contiguous
    assert picture.shape[0] - height * factor in (0, 1) and picture.shape[1] - width * factor in (0, 1)
    naive = np.stack([np.kron(frame, np.ones((factor, factor), np.uint8))] * 3, axis=2)
    assert (picture[:height * factor, :width * factor] == naive).all()


def test_floats_within_0_and_1_are_converted_to_bytes():
    frame = np.array([[[0.0, 0.5, 1.0]]])
    assert prepare_frame(frame)[0, 0].tolist() == [0, 128, 255]
    assert (prepare_frame(np.zeros((2, 2))) == 0).all()


def test_no_pictures_and_bad_pictures_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match="there are no frames"):
        write_mp4([], tmp_path / "a.mp4")
    with pytest.raises(UserError, match=r"uint8 .*float64 \[4, 4, 3\]"):
        write_mp4([np.full((4, 4, 3), 1.5)], tmp_path / "a.mp4")
    with pytest.raises(UserError, match="frame 3 has size 50x33"):
        write_mp4(solid(9, 2) + solid(9, 1, width=50), tmp_path / "a.mp4")
    with pytest.raises(UserError, match=r"does not end in \.mp4"):
        write_mp4(solid(9, 2), tmp_path / "a.avi")
    with pytest.raises(UserError, match="--fps"):
        write_gif(solid(9, 2), tmp_path / "a.gif", fps=0)
    with pytest.raises(UserError, match="cannot create"):
        (tmp_path / "file").write_text("")
        write_gif(solid(9, 2), tmp_path / "file" / "a.gif")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_broken_off_film_leaves_nothing_behind(tmp_path):
    def frames():
        yield from solid(9, 3)
        raise RuntimeError("the environment died")

    with pytest.raises(RuntimeError, match="died"):
        write_mp4(frames(), tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "write", "name"), [("imageio_ffmpeg", write_mp4, "a.mp4"),
                                                       ("PIL", write_gif, "a.gif")])
def test_a_missing_extra_is_named(monkeypatch, tmp_path, module, write, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'qfleet\[video\]'"):
        write(solid(9, 2), tmp_path / name)


@pytest.fixture
def pygame(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    module = pytest.importorskip("pygame")
    module.display.quit()  # an environment that rendered in this process may have left it open
    return module


def test_a_window_shows_every_picture_enlarged_under_its_title(pygame):
    seen = []

    def frames():
        for frame in solid((200, 30, 30), 3):
            if pygame.display.get_init():
                window = pygame.display.get_surface()
                seen.append((window.get_size(), tuple(window.get_at((5, 5)))[:3], pygame.display.get_caption()[0]))
            yield frame

    assert show(frames(), "a title", fps=240) == 3 and not pygame.display.get_init()
    assert seen == [((41 * 10, 33 * 10), (200, 30, 30), "a title")] * 2


@pytest.mark.parametrize(("kind", "key"), [("QUIT", None), ("KEYDOWN", "K_ESCAPE"), ("KEYDOWN", "K_q")])
def test_a_window_can_be_closed(pygame, kind, key):
    event = pygame.event.Event(getattr(pygame, kind), {"key": getattr(pygame, key)} if key else {})

    def frames():
        for number, frame in enumerate(solid((0, 0, 0), 9)):
            if number == 4:
                pygame.event.post(event)
            yield frame

    assert show(frames(), "x", fps=240) == 5


def test_other_keys_do_not_close_a_window(pygame):
    def frames():
        for frame in solid((0, 0, 0), 3):
            if pygame.display.get_init():
                pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_a))
            yield frame

    assert show(frames(), "x", fps=240) == 3


def test_a_window_that_cannot_be_opened_is_a_users_error(pygame, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "no such driver")
    with pytest.raises(UserError, match=r"cannot open a window \(.*\): record a video instead with `qfleet record`"):
        show(solid((0, 0, 0), 2), "x")


def test_a_window_needs_pictures_of_one_size(pygame):
    with pytest.raises(UserError, match="frame 2 has size 20x20"):
        show([*solid((0, 0, 0), 1), *solid((0, 0, 0), 1, 20, 20)], "x", fps=240)
