"""What a reader sees of the page, and what the page does that nobody asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, Request, expect

HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
# Of every visible text the contrast with what is behind it (WCAG 2.2, 1.4.3), and what is wider
# than the screen; both as what a reader would point at.
AUDIT = (Path(__file__).parent / "audit.js").read_text()


@dataclass
class Seen:
    """What a page did that nobody asked for."""

    complaints: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request))

    def polls(self) -> int:
        return sum(request.url.endswith("/overview") for request in self.requests)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def figure(page: Page, name: str) -> Any:
    return page.locator("#figures > div", has_text=name).locator("dd").first


def read_points(page: Page, plot: str) -> list[str]:
    """What the keyboard reads of a plot, from its first point to its last."""
    canvas, tip = page.locator(f"{plot} .canvas"), page.locator(f"{plot} .tip")
    expect(canvas.locator("canvas")).to_be_visible()
    canvas.focus()
    page.keyboard.press("Home")
    found: list[str] = []
    while not found or found[-1] != tip.inner_text():
        found.append(tip.inner_text())
        page.keyboard.press("ArrowRight")
    return found


def milliseconds(text: str) -> list[str]:
    return re.findall(r"([\d.]+)(?= ms| to )", text)


def as_milliseconds(seconds: float) -> str:
    """To three digits, as the page has it."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.09995 else f"{seconds * 1e3:.1f}"
