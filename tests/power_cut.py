"""A disk that loses what was not written through: it notes what a program has made safe, and what a power cut leaves of it.

Two things survive a cut for certain: the content of a file as of its last ``fsync``, and the names in a folder as of the last
``fsync`` of the folder. What happened since may be lost, or not, so that there are two worlds to look at: in one no later
change of names has reached the disk, in the other all have, though the content of the files has not.
"""

import os
import pathlib
from contextlib import contextmanager


class PowerCut(BaseException):
    """The machine is gone: nothing that the program does from here on counts."""


class Disk:
    """Watches a folder through the calls that change it.

    :param root: the folder; it is on the disk already.
    :param cut_at: number of the call at which the power goes, counted from 0; None never.
    :param broken: calls that do nothing although they return: ``"file"`` and ``"folder"`` for their ``fsync``.
    """

    def __init__(self, root, cut_at=None, broken=()):
        self.root, self.cut_at, self.broken = pathlib.Path(root), cut_at, broken
        self.calls, self.dead = 0, False
        self.content = {}  # by inode: what is safe of a file
        self.names = {}  # by folder: what is safe of its names
        for folder, _, files in os.walk(self.root):
            self._sync_names(pathlib.Path(folder))
            for name in files:
                self._sync_content(pathlib.Path(folder) / name)

    def _sync_names(self, folder):
        self.names[folder] = {path.name: None if path.is_dir() else path.stat().st_ino for path in folder.iterdir()}

    def _sync_content(self, path):
        self.content[path.stat().st_ino] = path.read_bytes()

    def _call(self):
        if self.dead or self.calls == self.cut_at:
            self.dead = True
            raise PowerCut
        self.calls += 1

    @contextmanager
    def attached(self, monkeypatch):
        """Watch the calls of this process while inside."""
        real_open, real_replace, real_unlink, real_mkdir = (
            getattr(pathlib.Path, name) for name in ("open", "replace", "unlink", "mkdir")
        )
        real_fsync, disk = os.fsync, self

        def inside(path):
            return disk.root in pathlib.Path(path).parents or pathlib.Path(path) == disk.root

        def open_(path, mode="r", *args, **kwargs):
            if inside(path) and mode[0] in "wax":
                disk._call()
                fresh = mode[0] != "a" and not path.exists()
                file = real_open(path, mode, *args, **kwargs)
                if fresh:
                    disk.content[path.stat().st_ino] = b""  # the number of a deleted file is used again
                return file
            return real_open(path, mode, *args, **kwargs)

        def fsync(descriptor):
            path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not inside(path):
                return real_fsync(descriptor)
            disk._call()
            kind = "folder" if path.is_dir() else "file"
            if kind not in disk.broken:
                (disk._sync_names if kind == "folder" else disk._sync_content)(path)
            return None

        def changing(real):
            def call(path, *args, **kwargs):
                if inside(path):
                    disk._call()
                return real(path, *args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            patched.setattr(pathlib.Path, "open", open_)
            patched.setattr(pathlib.Path, "replace", changing(real_replace))
            patched.setattr(pathlib.Path, "unlink", changing(real_unlink))
            patched.setattr(pathlib.Path, "mkdir", changing(real_mkdir))
            patched.setattr(os, "fsync", fsync)
            yield self

    def after_the_cut(self, target, names_written):
        """Make a folder of what is left.

        :param names_written: whether all later changes of names have reached the disk.
        """
        target = pathlib.Path(target)
        self._leave(self.root, target, names_written)
        return target

    def _leave(self, folder, target, names_written):
        target.mkdir(parents=True)
        if names_written:
            entries = {path.name: None if path.is_dir() else path.stat().st_ino for path in folder.iterdir()}
        else:
            entries = self.names.get(folder, {})
        for name, inode in entries.items():
            if inode is None:
                self._leave(folder / name, target / name, names_written)
            else:
                (target / name).write_bytes(self.content.get(inode, b""))
