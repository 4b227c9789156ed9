"""The calibration from plan to record, on a device that answers from a script."""

import json
import os
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from scripted_device import HARDWARE, ScriptedDevice, fine, with_hardware

from tunecast.calibrate import runner
from tunecast.calibrate.devices.protocol import Sensors, TrialResult
from tunecast.calibrate.flags import flags_of, record_flags
from tunecast.calibrate.plan import STORAGE_BENCHES, calibration_plan
from tunecast.calibrate.record import read_record
from tunecast.calibrate.runner import calibrate
from tunecast.catalogs.errors import DeviceError, InputError, TunecastError
from tunecast.cli.calibrate import resumed_words

PLAN = calibration_plan(HARDWARE, "quick")
RUNNABLE = [spec.key for spec in PLAN if spec.bench != "checkpoint"]


def failing_at(count, failure):
    """Answers well until the trial number `count`, then `failure` decides."""
    seen = 0

    def answer(spec):
        nonlocal seen
        seen += 1
        if seen == count:
            return failure(spec)
        return fine(spec)

    return answer


def interrupt(spec):
    raise KeyboardInterrupt


def lose(spec):
    raise DeviceError("cuda:0 stopped working; start again.")


def calibrated(device, tmp_path, **options):
    return calibrate(device, out_dir=tmp_path, fit=False, **options)


def test_one_record_with_every_trial_and_nothing_else(tmp_path):
    device = ScriptedDevice()
    path = calibrated(device, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    record = read_record(path)
    assert device.asked == RUNNABLE
    assert [trial["id"] for trial in record["trials"]] == list(range(len(PLAN)))
    assert record["protocol"] == {"version": runner.PROTOCOL_VERSION, "mode": "quick", "resumed_trials": 0}
    assert record["fitted"] is None
    assert record["flags"] == []


def test_raw_samples_are_kept_with_warmups_apart(tmp_path):
    record = read_record(calibrated(ScriptedDevice(), tmp_path))
    for spec, trial in zip(PLAN, record["trials"], strict=True):
        if trial["outcome"] == "ok":
            assert trial["samples_s"] == list(fine(spec).samples_s)
            assert trial["warmup_s"] == list(fine(spec).warmup_s)


def test_what_a_device_cannot_run_is_recorded_as_unsupported(tmp_path):
    record = read_record(calibrated(ScriptedDevice(), tmp_path))
    assert {trial["bench"] for trial in record["trials"] if trial["outcome"] == "unsupported"} == {"checkpoint"}


def test_out_of_memory_is_recorded_and_the_rest_goes_on(tmp_path):
    device = ScriptedDevice(failing_at(4, lambda spec: TrialResult(outcome="oom", message="CUDA out of memory")))
    record = read_record(calibrated(device, tmp_path))
    assert device.asked == RUNNABLE
    (failed,) = [trial for trial in record["trials"] if trial["outcome"] == "oom"]
    assert failed["message"] == "CUDA out of memory"
    assert failed["samples_s"] == []


@pytest.mark.parametrize(("failure", "error"), [(interrupt, KeyboardInterrupt), (lose, DeviceError)])
def test_interrupted_it_keeps_the_partial_and_resumes(tmp_path, failure, error):
    with pytest.raises(error):
        calibrated(ScriptedDevice(failing_at(11, failure)), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cpu.partial.jsonl"]
    second = ScriptedDevice()
    path = calibrated(second, tmp_path)
    assert second.asked == RUNNABLE[10:]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    whole = read_record(calibrated(ScriptedDevice(), tmp_path / "other"))
    assert read_record(path)["trials"] == whole["trials"]
    assert read_record(path)["protocol"]["resumed_trials"] == 10
    assert resumed_words(path) == [
        f"10 of {len(whole['trials'])} trials are of an interrupted calibration; --fresh measures all again."
    ]
    assert whole["protocol"]["resumed_trials"] == 0


def test_a_resume_that_cannot_write_keeps_what_was_measured(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    partial = tmp_path / "cpu.partial.jsonl"
    before = partial.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="No space left"):
            calibrated(ScriptedDevice(), tmp_path)
    assert partial.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [partial.name]
    second = ScriptedDevice()
    calibrated(second, tmp_path)
    assert second.asked == RUNNABLE[10:]


def test_fresh_starts_over(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    second = ScriptedDevice()
    calibrated(second, tmp_path, fresh=True)
    assert second.asked == RUNNABLE


@pytest.mark.parametrize("change", ["versions", "mode", "device", "protocol"])
def test_a_partial_of_something_else_is_not_used(tmp_path, monkeypatch, change):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    hardware = with_hardware(name="Another CPU") if change == "device" else HARDWARE
    second = ScriptedDevice(hardware=hardware)
    mode = "full" if change == "mode" else "quick"
    if change == "versions":
        second.versions["torch"] = "2.14.0"
    if change == "protocol":
        monkeypatch.setattr(runner, "PROTOCOL_VERSION", runner.PROTOCOL_VERSION + 1)
    calibrated(second, tmp_path, mode=mode)
    expected = [spec.key for spec in calibration_plan(hardware, mode) if spec.bench != "checkpoint"]
    assert second.asked == expected


def test_a_full_calibration_leaves_an_interrupted_quick_one_as_it_is(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    full = calibrated(ScriptedDevice(), tmp_path, mode="full")
    assert {entry.name for entry in tmp_path.iterdir()} == {"cpu.partial.jsonl", full.name}
    second = ScriptedDevice()
    calibrated(second, tmp_path)
    assert second.asked == RUNNABLE[10:]


def test_a_partial_cut_inside_a_line_loses_only_that_line(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    partial = tmp_path / "cpu.partial.jsonl"
    partial.write_bytes(partial.read_bytes()[:-20])
    second = ScriptedDevice()
    calibrated(second, tmp_path)
    assert second.asked == RUNNABLE[9:]


def test_garbage_in_place_of_the_partial_means_a_fresh_start(tmp_path):
    (tmp_path / "cpu.partial.jsonl").write_bytes(b"\xff\xfe\x00 not json\n[1, 2]\n")
    device = ScriptedDevice()
    calibrated(device, tmp_path)
    assert device.asked == RUNNABLE


def test_unwritable_output_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("in the way")
    device = ScriptedDevice()
    with pytest.raises(InputError, match="--out"):
        calibrated(device, tmp_path / "file" / "records")
    assert device.asked == []


def test_a_disk_that_fills_up_keeps_what_was_measured(tmp_path, monkeypatch):
    from tunecast.calibrate.partial import Partial

    kept = Partial.add
    calls = 0

    def full_after_five(self, key, trial):
        nonlocal calls
        calls += 1
        if calls > 5:
            monkeypatch.setattr("os.fsync", no_space)
        kept(self, key, trial)

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Partial, "add", full_after_five)
    with pytest.raises(DeviceError, match=r"No space left.*the same command goes on"):
        calibrated(ScriptedDevice(), tmp_path)
    monkeypatch.undo()
    second = ScriptedDevice()
    calibrated(second, tmp_path)
    assert second.asked == RUNNABLE[6:]


def test_progress_counts_up_and_foresees_the_end(tmp_path):
    told = []
    calibrated(ScriptedDevice(), tmp_path, progress=lambda *event: told.append(event))
    assert [done for done, *_ in told] == list(range(len(PLAN) + 1))
    assert {total for _, total, *_ in told} == {len(PLAN)}
    assert told[0][3] is None
    assert all(left is not None and left >= 0 for *_, left in told[1:])
    assert told[-1] == (len(PLAN), len(PLAN), "done", 0.0)
    assert any(what.startswith("step qlora") for _, _, what, _ in told)


def test_the_budget_ends_the_plan_and_says_so(tmp_path, monkeypatch):
    now = 0.0

    def clock():
        return now

    def slow(spec):
        nonlocal now
        now += 10.0
        return fine(spec)

    monkeypatch.setattr(runner.time, "monotonic", clock)
    device = ScriptedDevice(slow)
    record = read_record(calibrated(device, tmp_path))
    planned = [kind(asdict(spec)) for spec in runner.calibration_plan(device.hardware())]
    missing = {each for each in planned if each[0] not in STORAGE_BENCHES} - set(planned[:12])
    assert [kind(trial) for trial in record["trials"]][:12] == planned[:12]
    assert Counter(kind(trial) for trial in record["trials"][12:]) == dict.fromkeys(missing, 1)
    assert len(device.asked) == len(record["trials"])
    assert record["flags"] == ["cut_short"]


def test_a_gpu_on_which_no_tiny_step_runs_is_not_measured(tmp_path):
    """Packages that do not fit each other fail every step alike: a record of errors is of no use to anybody."""

    def broken(spec):
        return (
            TrialResult(outcome="error", message="RuntimeError: no bitsandbytes")
            if spec.bench == "step"
            else fine(spec)
        )

    device = ScriptedDevice(broken, hardware=with_hardware(device="cuda:0", gpu="l40s-48gb", compute_capability="8.9"))
    with pytest.raises(DeviceError, match=r"A tiny lora step does not run on cuda:0 \(RuntimeError: no bitsandbytes\)"):
        calibrated(device, tmp_path)
    assert len(device.asked) == 1
    assert not list(tmp_path.glob("*.json"))


def kind(trial):
    """What a trial measures, whatever its size."""
    return runner.kind_of(trial["bench"], trial["params"])


def test_collectives_are_measured_when_the_budget_has_ended(tmp_path, monkeypatch):
    now = 0.0

    def slow(spec):
        nonlocal now
        now += 10.0
        return fine(spec)

    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    record = read_record(calibrated(ScriptedDevice(slow), tmp_path, num_gpus=2))
    benches = [trial["bench"] for trial in record["trials"]]
    assert benches.count("collective") == 9
    assert benches[-9:] == ["collective"] * 9
    assert record["flags"] == ["cut_short"]


def test_flags_come_from_sensors_and_scatter(tmp_path):
    hot = Sensors(throttle_reasons=("hw_thermal_slowdown",), other_processes=2)

    def answer(spec):
        return TrialResult(
            outcome="ok", samples_s=(1.0, 2.0, 0.5, 3.0, 0.4), sensors_before=hot, sensors_after=Sensors()
        )

    device = ScriptedDevice(answer, hardware=with_hardware(mig=True), settles=False)
    record = read_record(calibrated(device, tmp_path))
    assert record["flags"] == ["clock_not_settled", "mig", "shared_gpu", "throttled", "unstable"]
    assert record["trials"][0]["sensors_before"]["throttle_reasons"] == ["hw_thermal_slowdown"]


@pytest.mark.parametrize(("device", "told"), [("cuda:0", ["host_varied"]), ("cpu", [])])
def test_steps_that_scatter_where_kernels_do_not_tell_of_the_host(tmp_path, device, told):
    def answer(spec):
        return TrialResult(outcome="ok", samples_s=(1.0, 1.5, 1.0, 1.4) if spec.bench == "step" else (1.0,) * 4)

    hardware = with_hardware(device=device)
    trials = [{"bench": bench, **asdict(answer(SimpleNamespace(bench=bench)))} for bench in ("step", *["gemm"] * 10)]
    found = record_flags(ScriptedDevice(answer), hardware, trials, settled=True, cut_short=False)
    assert found == told


@pytest.mark.parametrize(("device", "told"), [("cuda:0", "host_varied"), ("cpu", "unstable")])
def test_many_steps_that_scatter_do_not_make_the_kernels_of_a_card_unstable(device, told):
    """Nor do flags of a day when they did: those that trials tell are told anew. What sensors told stays."""
    samples = {"step": (1.0, 1.5, 1.0, 1.4), "gemm": (1.0,) * 4}
    trials = [
        {"bench": bench, **asdict(TrialResult(outcome="ok", samples_s=samples[bench]))}
        for bench in ("step",) * 5 + ("gemm",) * 10
    ]
    found = record_flags(ScriptedDevice(), with_hardware(device=device), trials, settled=True, cut_short=False)
    assert found == [told]
    stored = {"trials": trials, "hardware": {"device": device}, "flags": ["host_varied", "throttled", "unstable"]}
    assert flags_of(stored) == sorted(["throttled", told])


def test_the_devices_own_flags_are_kept(tmp_path):
    device = ScriptedDevice()
    device.flags = lambda: ("no_nvml",)
    assert read_record(calibrated(device, tmp_path))["flags"] == ["no_nvml"]


def test_records_name_no_host_and_no_folder(tmp_path):
    import getpass
    import platform

    text = calibrated(ScriptedDevice(), tmp_path).read_text()
    assert str(tmp_path) not in text
    assert json.dumps(platform.node()) not in text
    assert json.dumps(getpass.getuser()) not in text


@pytest.mark.parametrize("error", [InputError("nothing to fit"), ImportError("no scipy"), ValueError("nan")])
def test_a_failed_fit_leaves_the_record_and_names_the_command(tmp_path, monkeypatch, error):
    def failing(path):
        raise error

    monkeypatch.setattr(runner, "fit_file", failing)
    with pytest.raises(TunecastError, match=r"tunecast fit .*\.json"):
        calibrate(ScriptedDevice(), out_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    assert read_record(path)["fitted"] is None


def test_an_interruption_says_where_what_was_measured_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"10 trials are kept in .*cpu\.partial\.jsonl: the same command"):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    with pytest.raises(KeyboardInterrupt) as nothing:
        calibrated(ScriptedDevice(failing_at(1, interrupt)), tmp_path / "new")
    assert nothing.value.args == ()


def test_an_interruption_of_the_fit_says_how_to_fit(tmp_path, monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "fit_file", stopped)
    with pytest.raises(KeyboardInterrupt, match=r"was measured and written; to fit it, type: tunecast fit .*\.json"):
        calibrate(ScriptedDevice(), mode="quick", out_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    assert read_record(path)["fitted"] is None


def test_a_damaged_line_of_a_partial_is_measured_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrated(ScriptedDevice(failing_at(11, interrupt)), tmp_path)
    partial = tmp_path / "cpu.partial.jsonl"
    lines = partial.read_text().splitlines()
    damaged = json.loads(lines[4])
    lines[4] = json.dumps({"key": damaged["key"], "trial": {"foo": 1}})
    partial.write_text("\n".join(lines) + "\n")
    second = ScriptedDevice()
    calibrated(second, tmp_path)
    assert second.asked == [RUNNABLE[3], *RUNNABLE[10:]]
