"""Write torchx's default scheduler first into the entry points: torchx takes the first, and setuptools sorts them."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info

DEFAULT = "local_docker"


class EggInfo(egg_info):
    """The command that writes the metadata. Everything else is in pyproject.toml."""

    def run(self) -> None:
        super().run()
        file = Path(self.egg_info, "entry_points.txt")
        text = file.read_text(encoding="utf-8")
        group = "[torchx.schedulers]\n"
        before, _, rest = text.partition(group)
        own, end, after = rest.partition("\n\n")
        line = re.search(rf"^{DEFAULT} = .*\n", own, re.MULTILINE)
        if line is None:
            raise SystemExit(f"setup.py: pyproject.toml names no {DEFAULT} in torchx.schedulers")
        file.write_text(before + group + line[0] + own.replace(line[0], "") + end + after, encoding="utf-8")


setup(cmdclass={"egg_info": EggInfo})
