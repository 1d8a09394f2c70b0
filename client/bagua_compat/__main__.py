"""``python -m bagua_compat SCRIPT``: runs a Bagua script as it is; with torchrun's
variables, or through ``bagua-run --as-bagua``, which sets them."""

import sys

from bagua_client.launcher import main

if __name__ == "__main__":
    main(["--as-bagua", *sys.argv[1:]], module="bagua_compat")
