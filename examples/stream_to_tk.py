"""Stream answers to a Tk window, with a button that stops them.

Decoding runs in a thread, so the window stays responsive; text reaches it through a queue, because only the main thread
may touch Tk.

python stream_to_tk.py BUNDLE
"""

from __future__ import annotations

import sys
import threading
import tkinter as tk
from queue import Empty, SimpleQueue
from typing import Any

from dflash_runtime import ChatSession, GenerationConfig, load

CONFIG = GenerationConfig(max_new_tokens=512)
POLL = 30  # milliseconds


def answer(session: ChatSession, message: str, chunks: SimpleQueue[str | None]) -> None:
    """Say `message` and put the answer into `chunks` as it comes, at last None; what goes wrong is put there too."""
    try:
        for chunk in session.stream(message, CONFIG):
            chunks.put(chunk)
    except Exception as error:  # a thread has nobody else to tell
        chunks.put(f"[{error}]")
    finally:
        chunks.put(None)


class Window(tk.Tk):
    """A conversation: Return sends the line, Stop ends the answer."""

    def __init__(self, session: ChatSession) -> None:
        super().__init__()
        self.session = session
        self.chunks: SimpleQueue[str | None] = SimpleQueue()
        self.text = tk.Text(self, wrap="word")
        self.entry = tk.Entry(self)
        self.stop = tk.Button(self, text="Stop", command=session.engine.cancel, state="disabled")
        self.text.pack(fill="both", expand=True)
        self.stop.pack(side="right")
        self.entry.pack(fill="x", expand=True)
        self.entry.bind("<Return>", self.submit)
        self.protocol("WM_DELETE_WINDOW", self.close)
        self.entry.focus()

    def submit(self, event: tk.Event[Any] | None = None) -> None:
        message = self.entry.get()
        if message and str(self.stop["state"]) == "disabled":  # one answer at a time
            self.entry.delete(0, "end")
            self.text.insert("end", f"> {message}\n")
            self.stop["state"] = "normal"
            threading.Thread(target=answer, args=(self.session, message, self.chunks), daemon=True).start()
            self.poll()

    def poll(self) -> None:
        """Show what has come, and look again soon."""
        try:
            while (chunk := self.chunks.get_nowait()) is not None:
                self.text.insert("end", chunk)
                self.text.see("end")
        except Empty:
            self.after(POLL, self.poll)
        else:
            self.text.insert("end", "\n")
            self.stop["state"] = "disabled"

    def close(self) -> None:
        self.session.engine.cancel()
        self.destroy()


if __name__ == "__main__":
    Window(load(sys.argv[1]).chat()).mainloop()
