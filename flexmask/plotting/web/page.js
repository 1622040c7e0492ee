flexmaskView(document.getElementById("view"), JSON.parse(document.getElementById("data").textContent));
