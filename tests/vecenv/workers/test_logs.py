"""Tests of vecenv/workers/logs.py: what envs log in workers goes where the script sends its own messages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


LOGGING = """
import io, logging, logging.handlers, sys
import vecenv
from tests.helpers import CountingEnv

{configuration}

logging.getLogger("chatty").setLevel("WARNING")
logging.getLogger("disabled").disabled = True
logging.getLogger("apart").propagate = False
logging.getLogger("apart").addHandler(logging.NullHandler())
logging.getLogger("apart").addHandler(logging.StreamHandler(io.StringIO()))
logging.getLogger("apart without handlers").propagate = False

class Logging(CountingEnv):
    def step(self, action):
        logging.getLogger("robot").info("moved")
        logging.getLogger("robot").debug("details")
        logging.getLogger("chatty").info("chatter")
        for name in ("disabled", "apart"):
            logging.getLogger(name).error("never")
        logging.getLogger("apart without handlers").info("never")
        return super().step(action)

with vecenv.AsyncVectorEnv([lambda: Logging(0)], num_workers=1, context={context!r}) as envs:
    envs.reset()
    envs.step([0])
"""


CONFIGURATIONS = {
    "basicConfig": ("logging.basicConfig(level='INFO')", "INFO:robot:moved\n"),
    "stdout": ("logging.basicConfig(level='DEBUG', stream=sys.stdout, format='%(message)s')", "moved\ndetails\n"),
    "file": (
        "logging.basicConfig(level='INFO', handlers=[logging.handlers.RotatingFileHandler(sys.argv[1])])",
        "INFO:robot:moved\n",
    ),
    "file that the script overwrites": (
        "import atexit\nlogging.basicConfig(level='INFO', filename=sys.argv[1], filemode='w')\n"
        "atexit.register(logging.warning, 'over')",
        "INFO:robot:moved\nWARNING:root:over\n",
    ),
    "disabled": ("logging.basicConfig(level='DEBUG')\nlogging.disable('INFO')", ""),
    "named logger": (
        "logging.getLogger().setLevel('NOTSET')\nlogging.getLogger('robot').addHandler(logging.StreamHandler())",
        "moved\ndetails\n",
    ),
    "own handler, format and filter": (
        "class Own(logging.Handler):\n    emit = print\nclass Format(logging.Formatter):\n"
        "    def format(self, record):\n        return 'own ' + record.getMessage()\n"
        "handler = Own()\nhandler.setFormatter(Format())\nhandler.addFilter(lambda each: each.levelname == 'INFO')\n"
        "logging.basicConfig(level='DEBUG', handlers=[handler])",
        "own moved\n",
    ),
    "level of a handler, and a filter that cannot be pickled": (
        "import threading\nhandler = logging.StreamHandler()\nhandler.setLevel('INFO')\n"
        "handler.addFilter(lambda record, lock=threading.Lock(): True)\n"
        "logging.basicConfig(level='DEBUG', handlers=[handler])",
        "INFO:robot:moved\n",
    ),
}


@pytest.mark.parametrize(
    ("configuration", "logged", "context"),
    [
        *(pytest.param(*each, "forkserver", id=name) for name, each in CONFIGURATIONS.items()),
        pytest.param(*CONFIGURATIONS["basicConfig"], "fork", id="fork"),
    ],
)
def test_messages_that_envs_log_go_where_the_script_sends_its_own(configuration, logged, context, tmp_path):
    file = tmp_path / "log"
    script = LOGGING.format(configuration=configuration, context=context)
    done = subprocess.run([sys.executable, "-c", script, file], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr + (file.read_text() if file.exists() else "") == logged


def test_messages_that_envs_log_while_they_are_built_are_not_lost():
    script = (
        "import logging\nimport vecenv\nfrom tests.helpers import CountingEnv\nlogging.basicConfig(level='INFO')\n"
        "def make():\n    logging.getLogger('robot').info('found')\n    return CountingEnv(0)\n"
        "vecenv.AsyncVectorEnv([make], num_workers=1).close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == "INFO:robot:found\n"


HEAVY = """
import logging, sys
sys.path.insert(0, {folder!r})
import heavy
import vecenv
from tests.helpers import CountingEnv

handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(heavy.Format())
handler.addFilter(heavy.passes)
logging.getLogger("heavy").addHandler(handler)

class Logging(CountingEnv):
    def step(self, action):
        loaded = "heavy" in sys.modules
        if action:
            logging.getLogger("heavy").error("moved")
        return *super().step(action)[:4], {{"loaded": loaded, "after": "heavy" in sys.modules}}

with vecenv.AsyncVectorEnv([lambda: Logging(0)], num_workers=1) as envs:
    envs.reset()
    for action in (0, 1):
        infos = envs.step([action])[4]
        print(infos["loaded"][0], infos["after"][0], flush=True)
"""


def test_a_worker_imports_the_module_of_a_formatter_and_a_filter_when_a_message_needs_them(tmp_path):
    """Importing PyTorch adds a handler with a formatter of its own, and must not make every worker import PyTorch."""
    (tmp_path / "heavy.py").write_text(
        "import logging\n\nclass Format(logging.Formatter):\n    def format(self, record):\n"
        "        return 'heavy ' + record.getMessage()\n\ndef passes(record):\n    return True\n"
    )
    script = HEAVY.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == "False False\nheavy moved\nFalse True\n"


WARNING = """
import logging, warnings
{first}
import gymnasium as gym
import vecenv
from tests.helpers import CountingEnv

class Warns(CountingEnv):
    def step(self, action):
        warnings.warn("hot", UserWarning)
        warnings.warn("cold", RuntimeWarning)
        gym.logger.warn("old")
        return super().step(action)

{configuration}
with vecenv.AsyncVectorEnv([lambda: Warns(0)], num_workers=1) as envs:
    envs.reset()
    envs.step([0])
"""


@pytest.mark.parametrize(
    ("configuration", "printed"),
    [
        ("", ["hot", "cold", "old"]),
        ("warnings.filterwarnings('ignore')", []),
        ("warnings.filterwarnings('ignore', 'HO')", ["cold", "old"]),
        ("warnings.simplefilter('ignore', RuntimeWarning)", ["hot", "old"]),
        ("warnings.simplefilter('ignore')\nwarnings.simplefilter('default', RuntimeWarning)", ["hot", "cold", "old"]),
        ("import gymnasium as gym\ngym.logger.min_level = gym.logger.ERROR", ["hot", "cold"]),
    ],
)
@pytest.mark.parametrize("when", ["first", "configuration"])
def test_warnings_that_a_script_silences_are_silent_in_its_workers(configuration, printed, when):
    script = WARNING.format(**{"first": "", "configuration": "", when: configuration})
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = [word for word in ("hot", "cold", "old") if f": {word}\n" in done.stderr.replace("\x1b[0m", "")]
    assert seen == printed, done.stderr
