<?php
// Loads the PHP stubs below the folder given, and sends a message through bytes.
declare(strict_types=1);

use Anarchon\V1\{JobSpec, OverlapPolicy, SubscribeRequest};

error_reporting(E_ALL);
set_error_handler(function (int $level, string $message): bool {
    throw new ErrorException($message);
});
spl_autoload_register(function (string $class) use ($argv): void {
    $file = strtr($class, '\\', '/') . '.php';
    foreach ([$argv[1], '/usr/share/php'] as $folder) { // the latter: of the package php-google-protobuf
        if (is_file("$folder/$file")) {
            require_once "$folder/$file";
            return;
        }
    }
});

foreach (glob("$argv[1]/Anarchon/V1/*.php") as $file) {
    if (!str_ends_with($file, 'ServiceClient.php')) {
        require_once $file;
    }
}

$job = new JobSpec(['name' => 'hello', 'overlap' => OverlapPolicy::OVERLAP_POLICY_QUEUE]);
$sent = new SubscribeRequest(['session_id' => 'one', 'jobs' => [$job]]);
$got = new SubscribeRequest();
$got->mergeFromString($sent->serializeToString());
if ($got->getSessionId() !== 'one' || $got->getJobs()[0]->getOverlap() !== OverlapPolicy::OVERLAP_POLICY_QUEUE) {
    throw new Exception('something else came out');
}
echo "a session and a job\n";
