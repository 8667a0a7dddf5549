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
        [line] = re.findall(rf"^{DEFAULT} = .*\n", text, re.MULTILINE)
        group = "[torchx.schedulers]\n"
        file.write_text(text.replace(line, "").replace(group, group + line), encoding="utf-8")


setup(cmdclass={"egg_info": EggInfo})
