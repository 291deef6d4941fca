"""The table of docs/results.md is made of run folders as they are."""

import json

from benchmarks.learning import table


def run(folder, name, seed, score, wall_s):
    path = folder / f"20260101-00000{seed}-{name}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"env": "Env-v0", "seed": seed}))
    (path / "metrics.jsonl").write_text('{"wall_s": 1.0}\n' + json.dumps({"wall_s": wall_s}) + "\n")
    if score is not None:
        (path / "evaluation.json").write_text(json.dumps({"env_steps": 2048, "return_mean": score}))
    return path


def test_a_row_has_every_seed_in_order_their_mean_and_the_slowest_time(tmp_path):
    folders = [
        run(tmp_path, "some-preset", seed, score, 60.0 * seed) for seed, score in ((2, 3000), (0, 1000), (1, 0.5))
    ]
    folders.append(run(tmp_path, "unfinished", 3, None, 60.0))
    assert table(folders).splitlines()[2:] == ["| `some-preset` | Env-v0 | 2,048 | 1,000, 0.5, 3,000 | 1,333.5 | 2.0 |"]
