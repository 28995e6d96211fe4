"""Pictures of an episode: an animated GIF or a strip of PNG frames, drawn from the scenes that an environment describes.

An environment with ``scene`` (:mod:`frl.envs.scene`) is drawn as it says. For one without, and for host environments, observations, actions and reward are
plotted over time instead.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from frl.envs.scene import Circle, Line, Picture, Polygon
from frl.episode import Episode

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".gif", ".png")
_DPI = 100
_COLORS, _COLOR_DISTANCE = 64, 40  # most colors of a GIF, and how far apart they are
_LAST_FRAME_MS = 1200
_FONT, _LETTER = 9.0, 7.2  # size of a caption [points], and the width of its letters then [pixels]
_MOST_FRAMES, _MOST_PLOTS = 400, 60  # of a GIF of scenes, or of plots; a longer episode skips more steps between frames
_UNTIMED_SECONDS = 10.0  # of a GIF of an episode whose time is not known, at most
_NAMED_LINES = 8  # a panel with more has no legend


def render_episode(episode: Episode, path: str | Path, *, fps: float = 25.0, frames: int = 6, width: int = 360, title: str = "") -> Path:
    """Draw an episode: a ``.gif`` in real time, or a ``.png`` of frames side by side.

    Args:
        episode: of :func:`frl.play_episode`.
        path: file to write; its folder is made.
        fps: most frames for a second of a GIF.
        frames: pictures of a PNG, the first and the last of the episode among them.
        width: of one picture [pixels].
        title: a line above the plots over time of an episode without scenes.

    Returns:
        The path.

    Raises:
        ValueError: for another suffix or a number out of range.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a picture ends in {' or '.join(SUFFIXES)}, got {path.name!r}")
    if isinstance(fps, bool) or not 0 < fps < math.inf:
        raise ValueError(f"fps must be above 0, got {fps!r}")
    for name, value, low in (("frames", frames, 1), ("width", width, 64)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} must be at least {low}, got {value!r}")
    draw = _scene_drawer(episode, width) if episode.scenes else _signal_drawer(episode, title)
    if path.suffix.lower() == ".gif":
        steps, duration = _moments(episode, fps)
        data = _gif([draw(t) for t in steps], duration)
    else:
        data = _png(_side_by_side([draw(t) for t in (_spread(episode.length, frames) if episode.scenes else [episode.length])]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _moments(episode: Episode, fps: float) -> tuple[list[int], int]:
    """Steps to draw and the duration of each picture [ms], in the hundredths of a second that a GIF counts in; the last step is among them."""
    most = _MOST_FRAMES if episode.scenes else _MOST_PLOTS
    dt = episode.dt if math.isfinite(episode.dt) and episode.dt > 0 else min(0.05, _UNTIMED_SECONDS / episode.length)
    stride = max(1, math.ceil(1 / (fps * dt) - 1e-9), math.ceil(episode.length / most))
    steps = [*range(0, episode.length, stride), episode.length]
    return steps, max(20, 10 * round(100 * dt * stride))


def _spread(length: int, count: int) -> list[int]:
    """At most ``count`` steps from 0 to ``length``, evenly spaced."""
    return sorted({round(x) for x in np.linspace(0, length, count)})


def _canvas(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return FigureCanvasAgg(Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI))


def _image(canvas: Any) -> Image:
    from PIL import Image

    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _scene_drawer(episode: Episode, width: int) -> Callable[[int], Image]:
    """Pictures of all steps on one scale."""
    low_x, high_x = min(s.xlim[0] for s in episode.scenes), max(s.xlim[1] for s in episode.scenes)
    low_y, high_y = min(s.ylim[0] for s in episode.scenes), max(s.ylim[1] for s in episode.scenes)
    caption = 24
    height = min(2 * width, max(32, round(width * (high_y - low_y) / (high_x - low_x))))
    canvas = _canvas(width, height + caption)
    axes = canvas.figure.add_axes((0, caption / (height + caption), 1, height / (height + caption)))
    totals = np.concatenate([[0.0], np.cumsum(episode.rewards)])
    times = [f"{t * episode.dt:.2f} s" if math.isfinite(episode.dt) else f"step {t}" for t in range(episode.length + 1)]
    captions = [f"{time}   return {total:.2f}   {scene.caption}" for time, total, scene in zip(times, totals, episode.scenes, strict=True)]
    font = min(_FONT, _FONT * width / (_LETTER * max(len(text) for text in captions)))

    def draw(t: int) -> Image:
        scene = episode.scenes[t]
        axes.clear()
        axes.set(xlim=(low_x, high_x), ylim=(low_y, high_y), aspect="equal")
        axes.axis("off")
        for order, shape in enumerate(scene.shapes):
            if isinstance(shape, Picture):
                (left, bottom), (right, top) = shape.lower_left, shape.upper_right
                axes.imshow(shape.pixels, extent=(left, right, bottom, top), zorder=order, aspect="equal")
            else:
                axes.add_artist(_artist(shape, order))
        text = canvas.figure.text(0.02, 0.3 * caption / (height + caption), captions[t], fontsize=font)
        image = _image(canvas)
        text.remove()
        return image

    return draw


def _artist(shape: Circle | Line | Polygon, order: int) -> Any:
    from matplotlib import lines, patches

    if isinstance(shape, Circle):
        fill: dict[str, Any] = {"facecolor": shape.color, "edgecolor": "none"} if shape.filled else {"facecolor": "none", "edgecolor": shape.color}
        return patches.Circle(shape.center, shape.radius, linewidth=1.5, zorder=order, **fill)
    if isinstance(shape, Line):
        xs, ys = zip(*shape.points, strict=True)
        return lines.Line2D(xs, ys, color=shape.color, linewidth=shape.width, solid_capstyle="round", zorder=order)
    return patches.Polygon(list(shape.points), closed=True, facecolor=shape.color, edgecolor="none", zorder=order)


def _signal_drawer(episode: Episode, title: str) -> Callable[[int], Image]:
    """Observations, actions and reward over time, up to a step."""
    known = math.isfinite(episode.dt)
    scale = episode.dt if known else 1.0
    panels = (("observation", episode.obs), ("action", episode.actions), ("reward", episode.rewards[:, None]))
    canvas = _canvas(640, 560)
    figure = canvas.figure
    figure.set_layout_engine("constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    figure.suptitle(title or f"{episode.name}: {episode.length} steps, return {episode.episode_return:.2f}, {episode.ending}", fontsize=10)
    drawn: list[tuple[Any, np.ndarray, np.ndarray]] = []
    for ax, (name, values) in zip(axes, panels, strict=True):
        times = scale * np.arange(len(values))
        for i in range(values.shape[1]):
            # An action and a reward belong to the step that follows.
            (line,) = ax.plot(times, values[:, i], linewidth=1.2, label=f"{i}", drawstyle="default" if name == "observation" else "steps-post")
            drawn.append((line, times, values[:, i]))
        ax.set_ylabel(name, fontsize=9)
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
        if 1 < values.shape[1] <= _NAMED_LINES:
            ax.legend(loc="upper right", fontsize=7, ncols=min(4, values.shape[1]))
    axes[-1].set_xlabel("time [s]" if known else "step", fontsize=9)
    axes[-1].set_xlim(0, scale * max(1, episode.length))
    canvas.draw()  # limits and layout are those of the whole episode
    figure.set_layout_engine("none")
    for ax in axes:
        ax.set_autoscale_on(False)

    def draw(t: int) -> Image:
        for line, times, values in drawn:
            line.set_data(times[: t + 1], values[: t + 1])
        return _image(canvas)

    return draw


def _side_by_side(images: Sequence[Image]) -> Image:
    """Pictures in a row; wide ones in two columns."""
    from PIL import Image

    width, height = images[0].size
    columns = len(images) if width < 1.6 * height else min(2, len(images))
    rows = -(-len(images) // columns)
    whole = Image.new("RGB", (columns * width, rows * height), "white")
    for i, image in enumerate(images):
        whole.paste(image, (width * (i % columns), height * (i // columns)))
    return whole


def _png(image: Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()


def _gif(images: Sequence[Image], duration: int) -> bytes:
    """A loop with one palette for all frames, so that what does not move costs nothing; the last frame stays for a while."""
    palette = _palette([images[i] for i in _spread(len(images) - 1, 8)])
    reduced = [_reduced(image, palette) for image in images]
    durations = [duration] * (len(reduced) - 1) + [max(duration, _LAST_FRAME_MS)]
    data = io.BytesIO()
    reduced[0].save(data, "GIF", save_all=True, append_images=reduced[1:], duration=durations, loop=0, optimize=True)
    return data.getvalue()


def _colors(image: Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(colors [n, 3], index of each pixel among them, how often each occurs)``."""
    pixels = np.asarray(image).astype(np.int32)
    packed, index, counts = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True, return_counts=True)
    return np.stack([packed >> 16, packed >> 8 & 255, packed & 255], 1), index.reshape(pixels.shape[:2]), counts


def _palette(images: Sequence[Image]) -> np.ndarray:
    """The most common colors that are not close to a more common one, ``[n, 3]``: every color of a shape as it is, and few of the blends at edges.

    The palettes that Pillow makes lose thin lines, or turn white into a light grey.
    """
    colors, _, counts = _colors(_side_by_side(images))
    chosen = np.zeros((0, 3), dtype=np.int64)
    for color in colors[np.argsort(-counts, kind="stable")]:
        if (((chosen - color) ** 2).sum(1) > _COLOR_DISTANCE**2).all():
            chosen = np.vstack([chosen, color])
        if len(chosen) == _COLORS:
            break
    return chosen


def _reduced(image: Image, palette: np.ndarray) -> Image:
    from PIL import Image

    colors, index, _ = _colors(image)
    nearest = ((colors[:, None] - palette) ** 2).sum(-1).argmin(1)
    out = Image.fromarray(nearest[index].astype(np.uint8))
    out.putpalette(palette.astype(np.uint8).tobytes())
    return out
