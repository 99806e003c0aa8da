"""`faults run`: lines, JSON and exit statuses, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("cases")
PROGRAM = "import sys; from kvcanary_agent.faults.command import main; sys.exit(main(sys.argv[1:]))"

PASSING = json.loads((CASES / "public.jsonl").read_text(encoding="utf-8").splitlines()[0])
FAILING = {**PASSING, "id": "failing", "expect": [{"kind": "token", "from": 2, "by": 3}]}


def faults(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], input=given, capture_output=True, text=True, check=False
    )


def test_cases_that_pass_are_a_line_each_and_exit_0(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(PASSING) + "\n" + json.dumps({**PASSING, "id": "again"}) + "\n")
    done = faults("run", str(file))

    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first == f"{PASSING['id']}  expected clean  reported nothing  pass"
    assert second.startswith("again")
    assert done.stderr == "2 passed, 0 failed, 0 malformed\n"


def test_a_case_that_fails_says_why_and_exits_1() -> None:
    done = faults("run", "-", given=json.dumps(FAILING))

    assert done.returncode == 1
    assert done.stdout == ("failing  expected token@2..3  reported nothing  fail: no token during operations 2 to 3\n")


def test_a_malformed_case_exits_2_and_the_others_are_run() -> None:
    done = faults("run", "-", given='{"id": "broken"}\n' + json.dumps(FAILING))

    assert done.returncode == 2
    assert "-:1: pool" not in done.stderr
    assert "-:1: ops: expected this field, found nothing" in done.stderr
    assert done.stdout.startswith("failing")


def test_a_file_that_is_not_there_exits_2(tmp_path: Path) -> None:
    done = faults("run", str(tmp_path / "none.jsonl"))

    assert done.returncode == 2
    assert "none.jsonl: cannot be read" in done.stderr


def test_a_file_without_a_case_exits_2() -> None:
    done = faults("run", "-", given="\n\n")

    assert done.returncode == 2
    assert "at least one case" in done.stderr


def test_json_tells_every_report_in_full() -> None:
    case = next(
        case
        for case in map(json.loads, (CASES / "public.jsonl").read_text(encoding="utf-8").splitlines())
        if case["id"] == "bit-flip-last-layer"
    )
    done = faults("run", "--json", "-", given=json.dumps(case))
    told = json.loads(done.stdout)

    assert done.returncode == 0
    assert (told["id"], told["passed"], told["problems"], told["error"]) == (case["id"], True, [], None)
    (report,) = told["reports"]
    seen = {name: report[name] for name in ("kind", "op", "rank", "slot", "block", "req", "layer", "part", "step")}
    assert seen == {
        "kind": "content",
        "op": 4,
        "rank": 0,
        "slot": 6,
        "block": 1,
        "req": "A",
        "layer": 1,
        "part": "v",
        "step": 2,
    }


def test_a_command_line_that_is_wrong_exits_2() -> None:
    assert faults().returncode == 2
    assert faults("run").returncode == 2
