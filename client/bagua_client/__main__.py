"""``python -m bagua_client SCRIPT``; see :mod:`bagua_client.launcher.script`."""

from bagua_client.launcher.script import main

if __name__ == "__main__":
    main()
