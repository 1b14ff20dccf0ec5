"""A window that shows pictures as they come."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from qfleet.runs.video import prepare
from qfleet.screen import screen
from qfleet.types import UserError


def show(frames: Iterable[np.ndarray], title: str, fps: float = 30) -> int:
    """Show the pictures until they end or the window is closed (Esc and Q do, too); returns how many were shown."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # its greeting would go to stdout
    try:
        import pygame
    except ImportError:
        raise UserError("a window needs pygame: pip install 'qfleet[video]'") from None
    screen: Any = None
    shown = 0
    _require_display()
    pygame.display.init()
    clock = pygame.time.Clock()
    try:
        for frame in frames:
            picture = prepare(frame)
            if screen is None:
                screen = _open(pygame, picture, title)
            screen.blit(pygame.surfarray.make_surface(picture.swapaxes(0, 1)), (0, 0))
            pygame.display.flip()
            shown += 1
            clock.tick(fps)
            if any(_closes(pygame, event) for event in pygame.event.get()):
                break
    finally:
        pygame.display.quit()
    return shown


def _open(pygame: Any, picture: np.ndarray, title: str) -> Any:
    try:
        screen = pygame.display.set_mode((picture.shape[1], picture.shape[0]))
    except pygame.error as error:
        raise UserError(f"cannot open a window ({error}): film the agent instead with `qfleet record`") from None
    pygame.display.set_caption(title)
    return screen


def _closes(pygame: Any, event: Any) -> bool:
    return event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q))


def _require_display() -> None:
    """Say at once that there is no screen: SDL would otherwise draw into nothing without a word."""
    if screen() is None and not os.environ.get("SDL_VIDEODRIVER"):
        raise UserError("there is no display to open a window on: film the agent instead with `qfleet record`, "
                        "or connect with a display (ssh -X)")
