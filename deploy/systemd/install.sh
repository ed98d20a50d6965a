#!/bin/sh
# install.sh [WHEELHOUSE]: puts lightyear-node on a machine with systemd and Python 3.11 or newer.
# Run as root.  Touches /opt/lightyear-node, /usr/local/bin/lightyear-node, /etc/systemd/system,
# /etc/sysusers.d, /etc/tmpfiles.d and the folder /var/lib/lightyear-node; starts nothing.
# Running it again upgrades: docs/operators/upgrade.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
what=${PACKAGE:-lightyear-node}   # for example .[demo], or lightyear-node[medical]==0.1.0
python=${PYTHON:-python3}

[ "$(id -u)" = 0 ] || { echo "run this as root" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "$python is older than 3.11: name another, PYTHON=python3.11 sh $0" >&2; exit 1; }

# The program, in an environment of its own, with the versions that were tested together; from a
# folder of wheels where there is no internet.
"$python" -m venv /opt/lightyear-node
if [ $# -gt 0 ]; then
  /opt/lightyear-node/bin/pip install --quiet --upgrade --no-index --find-links "$1" "$what"
else
  /opt/lightyear-node/bin/pip install --quiet --upgrade -c "$here/../../constraints.txt" "$what"
fi
ln -sf /opt/lightyear-node/bin/lightyear-node /usr/local/bin/lightyear-node

# The user, its folder, the service.
install -D -m 0644 "$here/lightyear-node.sysusers" /etc/sysusers.d/lightyear-node.conf
install -D -m 0644 "$here/lightyear-node.tmpfiles" /etc/tmpfiles.d/lightyear-node.conf
install -D -m 0644 "$here/lightyear-node.service" /etc/systemd/system/lightyear-node.service
systemd-sysusers /etc/sysusers.d/lightyear-node.conf
systemd-tmpfiles --create /etc/tmpfiles.d/lightyear-node.conf
[ ! -d /run/systemd/system ] || systemctl daemon-reload

cat <<'NEXT'
Installed.  Next, as root:
  cd /var/lib/lightyear-node
  runuser -u lightyear -- lightyear-node init . --name NAME --address HOST:7443
  runuser -u lightyear -- lightyear-node id        # the line that the other hospitals need
  … put the agreed peers.yaml here, then
  runuser -u lightyear -- lightyear-node check
  systemctl enable --now lightyear-node
NEXT
