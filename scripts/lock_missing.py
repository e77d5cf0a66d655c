"""Print the pins of a lock file that the running environment does not hold, each with the reason as a comment.

The output is itself a requirements file, and empty when the environment is complete. A distribution counts only if
the files that pip recorded for it are there, so that an installation that was cut off is seen.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path


def problem(name: str, version: str) -> str | None:
    """Why `name==version` does not count as installed, or None if it does."""
    try:
        distribution = Distribution.from_name(name)
    except PackageNotFoundError:
        return "not installed"
    if distribution.version != version:
        return f"{distribution.version} is installed"
    # Console scripts stand outside site-packages and may have been removed on purpose.
    files = [file for file in distribution.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    if not files:
        return "installed without a record of its files"
    missing = next((file for file in files if not Path(str(distribution.locate_file(file))).exists()), None)
    return f"{missing} is not there" if missing else None


def main(lock: Path) -> None:
    for line in lock.read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].strip()
        if pin:
            name, _, version = pin.partition("==")
            if why := problem(name, version):
                print(f"{pin}  # {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
