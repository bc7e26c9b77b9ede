#!/bin/sh
# Unpacks the Debian programs that slow tests drive into a folder, without root and without installing them.
# usage: unpack.sh FOLDER
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
  echo "apt-get and dpkg-deb are missing: the slow tests take redis-server and prometheus from Debian's packages" >&2
  exit 2
}
state=$folder/apt
mkdir -p "$state/lists/partial" "$state/archives/partial"
apt() {
  tool=$1 && shift
  "apt-$tool" -q -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state" -o Dir::Cache::Archives="$state/archives" \
    -o APT::Sandbox::User=root "$@"
}
apt get update >"$state/log" 2>&1 || { cat "$state/log" >&2; exit 1; }
cd "$state/archives"
# The programs, and the libraries of theirs that a small system lacks.
apt get download redis-server redis-tools libatomic1 libjemalloc2 liblzf1 libssl3 libsystemd0 prometheus \
  >"$state/log" 2>&1 || { cat "$state/log" >&2; exit 1; }
for package in *.deb; do
  dpkg-deb -x "$package" "$folder/root"
done
mkdir -p "$folder/bin"
for path in redis-check-rdb redis-cli prometheus promtool; do
  # A wrapper, since the libraries lie beside the programs.
  cat >"$folder/bin/$path" <<EOF
#!/bin/sh
LD_LIBRARY_PATH="$folder/root/usr/lib/$(uname -m)-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" exec "$folder/root/usr/bin/$path" "\$@"
EOF
  chmod +x "$folder/bin/$path"
done
# The server is the same file as redis-check-rdb: it looks at the name that it is called by.
sed "s|exec \"\(.*\)/redis-check-rdb\"|exec \"\1/redis-server\"|" "$folder/bin/redis-check-rdb" >"$folder/bin/redis-server"
chmod +x "$folder/bin/redis-server"
cd "$folder"
rm -rf "$state"
"$folder/bin/redis-server" --version
"$folder/bin/promtool" --version | head -1
