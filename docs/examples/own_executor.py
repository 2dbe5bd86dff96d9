"""A custom executor: a process group with a longer time limit, which records what it runs."""

from pathlib import Path

from tcverify import ProcessGroupPool, dumps, register_executor


class Recording(ProcessGroupPool):
    """Keeps every pair of programs as JSON, to run it elsewhere, too."""

    def submit(self, original, rewritten, *args, **kwargs):
        Path("programs").mkdir(exist_ok=True)
        number = len(list(Path("programs").glob("*-before.json")))
        Path(f"programs/{number}-before.json").write_text(dumps(original))
        Path(f"programs/{number}-after.json").write_text(dumps(rewritten))
        return super().submit(original, rewritten, *args, **kwargs)


register_executor("recording", lambda world_size: Recording(world_size, timeout=600))
