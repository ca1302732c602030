"""The attack on a release build: what is tried, area by area, and what held.

    make attack                              30 minutes of it
    make attack MINUTES=5 ONLY=hub,privacy   some areas for less
    make attack SEED=7                       other random numbers; a seed repeats what its run tried

Each area tries a list and then, while its share of the time lasts, random kin of it. Exit code 1 when something
broke; each such thing has a
file under target/attack/broke with what brings it about. Nothing leaves this machine, and what is attacked runs under
a memory limit.
"""

import argparse
import importlib
import pathlib
import resource
import shutil
import signal
import sys
import time
import traceback

import common

# Areas, each a file with a function `attack(area)`, and their shares of the time.
AREAS = {
    "load": 5,
    "sockets": 4,
    "memory": 2,
    "builds": 3,
    "caches": 2,
    "models": 4,
    "templates": 2,
    "bombs": 2,
    "shapes": 2,
    "privacy": 1,
    "hub": 1,
    "process": 2,
    "costs": 1,
}


def main():
    parser = argparse.ArgumentParser(
        prog="make attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", default=common.ROOT / "target" / "release" / "moebius", type=pathlib.Path)
    parser.add_argument("--minutes", default=30, type=float)
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--only", default="", help="areas, with commas between them: " + ", ".join(AREAS))
    args = parser.parse_args()
    chosen = [name for name in args.only.split(",") if name] or list(AREAS)
    if unknown := set(chosen) - set(AREAS):
        parser.error(f"there is no area {', '.join(unknown)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shutil.rmtree(common.OUT, ignore_errors=True)
    common.OUT.mkdir(parents=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the report and the groups are seen to, as with Ctrl-C
    total = sum(AREAS[name] for name in chosen)
    areas = []
    try:
        for name in chosen:
            areas.append(one(name, args, 60 * args.minutes * AREAS[name] / total))
    except KeyboardInterrupt:
        print("stopped: the table has what was done", flush=True)
    finally:
        common.remove_groups()
    report(areas, args.seed)
    sys.exit(any(area.broken for area in areas))


def one(name, args, seconds):
    print(f"{name}, about {seconds:.0f} s", flush=True)
    area = common.Area(name, args.binary.resolve(), args.seed, seconds)
    start = time.monotonic()
    try:
        importlib.import_module(name).attack(area)
    except Exception:  # an area that fails is a finding, and the others go on
        area.check("the area itself", "it failed", traceback.format_exc())
    area.took = time.monotonic() - start
    shutil.rmtree(area.dir, ignore_errors=True)
    print(f"  {area.tried} tried, {area.tried - len(area.broken)} held, {area.took:.0f} s", flush=True)
    return area


def report(areas, seed):
    lines = ["| area | tried | held | what broke |", "|---|---|---|---|"]
    for area in areas:
        kinds = {}  # what broke in the same way is one entry
        for what, path in area.broken:
            kinds.setdefault(what.replace("|", "/")[:200], []).append(path.name)
        broken = "<br>".join(
            what + f" ({names[0]}" + (f" and {len(names) - 1} more)" if names[1:] else ")")
            for what, names in kinds.items()
        )
        lines.append(f"| {area.name} | {area.tried} | {area.tried - len(area.broken)} | {broken} |")
    notes = [f"{area.name}: {note}" for area in areas for note in area.notes]
    text = "\n".join([f"seed {seed}", "", *lines, "", *notes])
    print(f"\n{text}")
    (common.OUT / "report.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
