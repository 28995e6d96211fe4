"""``frl render RUN``: one episode of a trained policy as a picture."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from frl.commands.options import add_run_options, count, positive, threads


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser."""
    parser = commands.add_parser("render", help="draw an episode of a trained policy")
    add_run_options(parser)
    parser.add_argument("--output", metavar="FILE", help=".gif (moving) or .png (frames side by side); default: renders in the run directory")
    parser.add_argument("--signals", action="store_true", help="plot observations, actions and reward over time, also where the environment has a picture")
    parser.add_argument("--fps", type=positive, default=25.0, help="most frames for a second of a .gif (default: 25)")
    parser.add_argument("--frames", type=count, default=6, metavar="N", help="frames of a .png (default: 6)")
    parser.add_argument("--width", type=count, default=360, metavar="PIXELS", help="width of a frame (default: 360)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    import dataclasses

    from frl.episode import play_episode
    from frl.load import load_run, newest_run
    from frl.render import SUFFIXES, render_episode

    if arguments.output is not None and Path(arguments.output).suffix.lower() not in SUFFIXES:
        print(f"frl: --output must end in {' or '.join(SUFFIXES)}, got {arguments.output!r}", file=sys.stderr)
        return 2
    with load_run(newest_run(arguments.run), checkpoint=arguments.checkpoint, env=arguments.env, num_envs=1, device=arguments.device) as loaded:
        seed = loaded.final_seed if arguments.seed is None else arguments.seed
        with threads(loaded.config.trainer.threads):
            episode = play_episode(
                loaded.env,
                lambda obs, key: loaded.act(obs, key if arguments.stochastic else None),
                seed=seed,
                max_steps=loaded.config.trainer.max_eval_steps if arguments.max_steps is None else arguments.max_steps,
            )
    if arguments.signals:
        episode = dataclasses.replace(episode, scenes=())
    path = Path(arguments.output) if arguments.output is not None else loaded.path / "renders" / _name(loaded, seed, bool(episode.scenes))
    render_episode(episode, path, fps=arguments.fps, frames=arguments.frames, width=arguments.width)
    print(f"{episode.name}: {episode.length} steps, return {episode.episode_return:.4g}, {episode.ending}")
    print(f"picture: {path}")
    return 0


def _name(loaded: Any, seed: int, scenes: bool) -> str:
    env = re.sub(r"[^\w-]+", "_", loaded.env_name)
    return f"{env}_step_{loaded.global_step}_seed_{seed}{'.gif' if scenes else '.png'}"
