"""What a rank does in `test_setups.py`: the draws one after another; rank 0 leaves what failed."""

import json
import os
import traceback
from pathlib import Path

from tests.support.engine_runs import FSDP2, allow_engines_on_cpu
from tests.support.setup_draws import draw_setup
from tests.support.setup_runs import check_setup


def check_setups(folder, engine, seeds):
    allow_engines_on_cpu(FSDP2 if engine == "fsdp2" else {})
    failed = {}
    for seed in seeds:
        try:
            check_setup(draw_setup(seed, engine), f"{folder}/{seed}")
        except Exception:
            failed[seed] = traceback.format_exc()
    Path(folder, f"failed{os.environ['RANK']}.json").write_text(json.dumps(failed))
