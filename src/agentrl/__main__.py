"""`python -m agentrl`, which is what torchrun starts."""

import sys

from agentrl.cli.main import main

sys.exit(main())
