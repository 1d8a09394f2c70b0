"""A PostgreSQL database copied and put back by its own tools, as docs/operating.md says; and what
is told of a database that is well, whichever it is."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, make_url, text

from bagua_autotune.cli import main
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance import checkup
from tests.autotune.store.postgresql import find_binaries
from tests.autotune.support import make_spec, present, stored_jobs

OPERATING = Path(__file__).parents[4] / "docs" / "operating.md"
TOOLS = re.compile(r"^    ((?:pg_dump|dropdb|createdb|pg_restore) .*)$", re.MULTILINE)
PRINTED = "postgresql://autotune@db.example.com/"


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
@pytest.mark.slow
def test_a_copy_of_a_server_is_put_back_as_the_page_says(empty_url: str, tmp_path: Path) -> None:
    binaries = present(find_binaries())
    dump, drop, create, put_back = TOOLS.findall(OPERATING.read_text())
    url = make_url(empty_url)
    server = f"postgresql://{url.username}@{url.host}:{url.port}/"

    def run(printed: str) -> subprocess.CompletedProcess[str]:
        printed = re.sub(r"\bautotune(?=$| autotune\.dump$)", str(url.database), printed)
        words = shlex.split(printed.replace(PRINTED, server))
        command = [str(binaries / words[0]), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    store = Store(empty_url)
    assert store.jobs.create("kept", make_spec(), at=1.0)
    copied = run(dump)  # while the store is open
    assert copied.returncode == 0, copied.stderr
    assert store.jobs.create("later", make_spec(), at=2.0)
    store.database.write(text("CREATE TABLE of_a_newer_release (id BIGINT)"))
    refused = run(drop)
    assert refused.returncode != 0
    assert "is being accessed by other users" in refused.stderr
    assert [job.id for job in stored_jobs(store)] == ["later", "kept"]
    store.close()
    for command in (drop, create, put_back):
        done = run(command)
        assert done.returncode == 0, done.stderr
    store = Store(empty_url, as_found=True)
    assert [job.id for job in stored_jobs(store)] == ["kept"]
    assert tuple(store.jobs.tensors("kept")) == make_spec().tensors
    assert store.jobs.create("new", make_spec(), at=3.0)
    store.close()
    engine = create_engine(empty_url)
    with engine.connect() as connection:
        gone = "SELECT to_regclass('of_a_newer_release') IS NULL"
        assert connection.exec_driver_sql(gone).scalar()
    engine.dispose()
    checked = CliRunner().invoke(main, ["doctor", "--database", empty_url])
    assert checked.exit_code == 0, checked.output


def test_a_database_that_is_well_has_no_faults(store: Store, job: str) -> None:
    findings = list(checkup.examine(store))
    assert not [finding.words for finding in findings if finding.is_fault]
    assert findings[-1].words.startswith("1 of 1 jobs can be read, from 1970-")
    assert len(findings) >= 3
