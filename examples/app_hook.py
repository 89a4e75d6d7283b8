"""Runs before the program of a frozen app (see app.spec), which may have been started to render chat templates.

Elsewhere the Python interpreter is started for that; a frozen app has none but itself.
"""

import sys

from dflash_runtime.chat import FROZEN_FLAG

if FROZEN_FLAG in sys.argv:
    from dflash_runtime.chat_worker import main

    main()
    sys.exit()
