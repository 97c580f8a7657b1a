"""The scrub of a real daemon: flipped bits on its disk are found before anybody asks for them."""

import json

from click.testing import CliRunner, Result

from kvtierd.ctl.main import main
from kvtierd.tiers.spill_files import PAYLOAD_NAME
from tests.fault.checker import KNOWN, Promises
from tests.fault.test_media import BLOCKS, KEYS, store_on_nvme
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.wait import until


def ctl(daemon: DaemonProcess, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--socket", daemon.admin_path, *arguments])


def test_flipped_bits_are_found_reported_and_never_served(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(spill={"direct_io": "off"})
    daemon.sections["scrub"] = {"rate": "1GiB"}
    daemon.start()
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        sound = ctl(daemon, "scrub", "--wait", "--json")
        found = json.loads(sound.stdout)
        assert sound.exit_code == 0 and found["checked_blocks"] == BLOCKS + len(KEYS)

        payload = daemon.state_path / "spill" / PAYLOAD_NAME
        data = payload.read_bytes()
        seeds = promises.pages[session]
        hurt = [page for page in seeds if page % 7 == 0]
        with payload.open("r+b") as file:
            for page in hurt:
                at = data.index((seeds[page] + 1).to_bytes(8, "little") * 8192)
                file.seek(at + 1000 * page)
                file.write(bytes([data[at + 1000 * page] ^ 4]))
        damaged = ctl(daemon, "scrub", "--wait")
        assert damaged.exit_code == 40, damaged.output
        assert f"{len(hurt)} bad, 0 unreadable, {len(hurt)} lost" in damaged.stdout
        for page in hurt:
            assert client.code("acquire", client.lease(), session, 0, KNOWN, page, 1, 30.0) == 402
        counters = daemon.counters()
        assert counters["lost_blocks"] == counters["scrub_bad_blocks"] == len(hurt)
        assert counters["restored_blocks"] == 0  # nothing went through DRAM
        assert "kvtierd_scrub_bad_blocks_total 7.0" in ctl(daemon, "metrics").stdout
        assert "blocks of tenant t on NVMe are not what was written" in daemon.log()


def test_when_a_pass_last_ended_is_known_after_a_restart(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.sections["scrub"] = {"interval": "1h"}
    daemon.start()
    until(lambda: daemon.admin("stats")["scrub"]["number"] == 1, "the first pass begins by itself")
    until(lambda: not daemon.admin("stats")["scrub"]["running"], "it ends")
    daemon.stop()
    daemon.start()
    scrub = daemon.admin("stats")["scrub"]
    assert 0 <= scrub["since_pass_s"] < 600
    assert scrub["number"] == 0 and not scrub["running"]  # the next one is due in an hour
