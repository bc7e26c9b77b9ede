#!/bin/sh
# Puts Debian's chromium into a folder, without root: the installed one if there is one, else its packages unpacked.
# usage: unpack_browser.sh FOLDER
set -eu
folder=$(mkdir -p "$1/bin" && cd "$1" && pwd)
if command -v chromium >/dev/null; then
  ln -sf "$(command -v chromium)" "$folder/bin/chromium"
  exec "$folder/bin/chromium" --version
fi
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
  echo "chromium is missing, and apt-get and dpkg-deb to get it with: the browser tests drive it; install chromium" >&2
  exit 2
}
state=$folder/apt-browser
archives=$state/archives
mkdir -p "$state/lists/partial" "$archives/partial"
# -d: packages are fetched, with those that they need and this system lacks, and nothing is installed.
apt() {
  tool=$1 && shift
  "apt-$tool" -q -y -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state" -o Dir::Cache::Archives="$archives" \
    -o Debug::NoLocking=1 -o APT::Sandbox::User=root "$@" >"$state/log" 2>&1 || {
    cat "$state/log" >&2
    echo "chromium could not be fetched from Debian's packages: as root, apt-get install chromium" >&2
    exit 2
  }
}
apt get update
apt get install -d --no-install-recommends chromium fonts-dejavu-core
for package in "$archives"/*.deb; do
  # The C library has to be that of the system's own loader.
  case $package in */libc6_* | */libc-bin_*) continue ;; esac
  dpkg-deb -x "$package" "$folder/browser"
done
libraries=$folder/browser/usr/lib/$(uname -m)-linux-gnu
# The system's own fonts and, where it has none, those that were unpacked.
mkdir -p "$folder/browser/fonts"
cat >"$folder/browser/fonts/fonts.conf" <<EOF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir>$folder/browser/usr/share/fonts</dir>
  <cachedir>$folder/browser/fonts/cache</cachedir>
</fontconfig>
EOF
cat >"$folder/bin/chromium.new" <<EOF
#!/bin/sh
export FONTCONFIG_FILE="$folder/browser/fonts/fonts.conf"
LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio:$folder/browser/lib/$(uname -m)-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" \\
  exec "$folder/browser/usr/lib/chromium/chromium" "\$@"
EOF
chmod +x "$folder/bin/chromium.new"
rm -rf "$state"
"$folder/bin/chromium.new" --version
mv "$folder/bin/chromium.new" "$folder/bin/chromium"
