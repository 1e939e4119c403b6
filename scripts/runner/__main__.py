"""`python -m scripts.runner [demo]`: behind `scripts/run` and `scripts/demo`.

Until the programs handle signals themselves, Ctrl-C ends this process without a traceback. The
imports take long enough to be interrupted, so they come behind the first statements. The commands
start Python with SIGINT blocked, so that one that came before them is delivered there.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.argv[1:2] == ["demo"]:
        from scripts.runner.story import main as tell

        sys.exit(tell(sys.argv[2:]))
    from scripts.runner.supervisor import main

    sys.exit(main(sys.argv[1:]))
